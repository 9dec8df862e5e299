"""SGLang's flags that a Kimi model serves with: what each is for happens, and answers stay those of a server
without it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from tests.compatibility.table import given
from tests.server.conftest import TINY, Model
from tests.server.harness import Server, told

EXACT = ("--dtype", "float32", "--enable-deterministic-inference", "--page-size", "16")
EXACT += ("--max-running-requests", "4", "--max-mamba-cache-size", "40", "--max-total-tokens", "8192")
TOKENS = 12
KEY = "k3-secret"
INTERVAL = 4


@pytest.fixture(scope="module")
def prompts(trained_k3: Model) -> list[list[int]]:
    return [ids for ids in trained_k3.prompts if 10 < len(ids) < 400][:6]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> list[tuple]:
    """Answers of a server without any of the flags."""
    with Server(TINY, tmp_path_factory.mktemp("plain") / "log", *EXACT) as server:
        return [told(server.answer(ids, TOKENS)) for ids in prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """With everything that is for clients and operators."""
    flags = ("--enable-return-hidden-states", "--api-key", KEY, "--served-model-name", "tiny")
    flags += (
        "--constrained-json-disable-any-whitespace",
        "--weight-version",
        "seven",
        "--stream-interval",
        str(INTERVAL),
        "--enable-response-store",
    )
    flags += ("--enable-priority-scheduling", "--default-priority-value", "0", "--max-queued-requests", "6")
    flags += (
        "--log-requests",
        "--log-requests-format",
        "json",
        "--log-requests-target",
        str(folder / "requests"),
    )
    flags += ("--export-metrics-to-file", "--export-metrics-to-file-dir", str(folder / "metrics"))
    flags += ("--enable-metrics", "--extra-metric-labels", '{"site": "here"}')
    flags += ("--return-input-ids", "--return-output-ids")
    flags += ("--bucket-time-to-first-token", "0.25", "0.5", "--crash-dump-folder", str(folder / "crash"))
    with Server(TINY, folder / "log", *EXACT, *flags) as running:
        running.headers = {"Authorization": f"Bearer {KEY}"}
        yield running


@pytest.fixture(scope="module")
def inert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With all at once that the table says to change nothing, and another grammar backend."""
    log = tmp_path_factory.mktemp("inert") / "log"
    with Server(TINY, log, *EXACT, *given(), "--grammar-backend", "outlines") as running:
        yield running


def generate(server: Server, ids: list[int], tokens: int = TOKENS, **more: Any) -> Any:
    """What /generate answers, greedily unless `sampling` says else; a list where it asks for several."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling", {})}
    response = server.post("/generate", {"input_ids": ids, "sampling_params": sampling, **more})
    assert response.status_code == 200, response.text + server.tail()
    return response.json()


def test_answers_are_those_of_a_server_without_the_flags(
    server: Server, plain: list[tuple], prompts: list[list[int]]
) -> None:
    assert [told(server.answer(ids, TOKENS)) for ids in prompts] == plain


def test_flags_that_change_nothing_change_nothing(
    inert: Server, plain: list[tuple], prompts: list[list[int]]
) -> None:
    """Cold and from the prefix cache."""
    for _ in range(2):
        assert [told(inert.answer(ids, TOKENS)) for ids in prompts] == plain
    assert len({tuple(ids) for ids, *_ in plain}) == len(prompts)


def test_a_request_without_the_key_is_turned_away(server: Server) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=60)
        assert answer.status_code == 401
    assert server.post("/generate", body).status_code == 200


def test_the_model_has_the_name_it_was_given(server: Server) -> None:
    listed = requests.get(f"{server.url}/v1/models", headers=server.headers, timeout=60).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]


def test_hidden_states_are_what_the_head_reads(server: Server, prompts: list[list[int]]) -> None:
    head = load_file(TINY / "model.safetensors")["language_model.lm_head.weight"].float()
    answer = generate(server, prompts[0], 5, return_hidden_states=True)
    prompt, *steps = answer["meta_info"]["hidden_states"]
    assert len(prompt) == len(prompts[0]) - answer["meta_info"]["cached_tokens"] and len(steps) == 4
    rows = torch.tensor([prompt[-1], *[step[0] if isinstance(step[0], list) else step for step in steps]])
    assert (rows @ head.T).argmax(-1).tolist() == answer["output_ids"]


def test_a_stream_comes_in_pieces_of_the_interval(server: Server, prompts: list[list[int]]) -> None:
    body = {
        "input_ids": prompts[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    }
    lengths = []
    with requests.post(
        f"{server.url}/generate",
        json={**body, "stream": True},
        headers=server.headers,
        stream=True,
        timeout=300,
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                lengths.append(json.loads(line[6:])["meta_info"]["completion_tokens"])
    assert lengths[-1] == 20 and len(lengths) <= 20 // INTERVAL + 2


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "small": {"type": "boolean"}},
    "required": ["kind", "small"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": (json.dumps(SCHEMA), r'\{"kind": ?"(cat|dog)", ?"small": ?(true|false)\}'),
    "ebnf": ('root ::= "a" ("b" | "c") "d"', r"a[bc]d"),
    "regex": (r"[0-9]{3}-[a-f]{2}", r"[0-9]{3}-[a-f]{2}"),
    "structural_tag": (
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {"type": "regex", "pattern": "[0-9]{2}"},
                    "end": "</n>",
                },
            }
        ),
        r"<n>[0-9]{2}</n>",
    ),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_answer_is_bound_by_its_grammar(server: Server, prompts: list[list[int]], kind: str) -> None:
    grammar, shape = GRAMMARS[kind]
    sampling = {kind: grammar, "ignore_eos": False, "temperature": 1.0, "sampling_seed": 3}
    texts = [generate(server, ids, 64, sampling=sampling)["text"] for ids in prompts]
    assert all(re.fullmatch(shape, text) for text in texts), texts


def test_several_answers_to_one_prompt(server: Server, prompts: list[list[int]], plain: list[tuple]) -> None:
    answers = generate(server, prompts[0], sampling={"n": 2})
    assert [answer["output_ids"] for answer in answers] == [plain[0][0]] * 2


def test_scores_are_the_probabilities_of_the_labels(server: Server, prompts: list[list[int]]) -> None:
    query, items, labels = prompts[0], prompts[1:3], [50, 60, 70]
    body = {"model": "tiny", "query": query, "items": items, "label_token_ids": labels, "apply_softmax": True}
    answer = server.post("/v1/score", body)
    assert answer.status_code == 200, answer.text
    for item, scores in zip(items, answer.json()["scores"], strict=True):
        meta = generate(server, query + item, 1, return_logprob=True, token_ids_logprob=labels)["meta_info"]
        logprobs = torch.tensor([entry[0] for entry in meta["output_token_ids_logprobs"][0]])
        assert torch.allclose(torch.tensor(scores), logprobs.softmax(0), atol=1e-5)


def test_a_higher_priority_goes_first_and_whom_it_displaces_answers_alike(
    server: Server, prompts: list[list[int]]
) -> None:
    low = prompts[:4]
    want = [generate(server, ids, 200)["output_ids"] for ids in low]
    server.flush()
    ended: dict[str, float] = {}

    def ask(name: str, ids: list[int], tokens: int, priority: int) -> dict[str, Any]:
        answer = generate(server, ids, tokens, priority=priority)
        ended[name] = time.monotonic()
        return answer

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(ask, f"low {i}", ids, 200, 0) for i, ids in enumerate(low)]
        while "sglang:num_running_reqs" in (text := metrics(server)) and value(text, "num_running_reqs") < 4:
            time.sleep(0.05)
        pool.submit(ask, "high", prompts[5], 4, 100).result()
        got = [future.result()["output_ids"] for future in running]
    assert min(ended, key=ended.__getitem__) == "high"
    assert got == want


def metrics(server: Server) -> str:
    return requests.get(f"{server.url}/metrics", headers=server.headers, timeout=60).text


def value(text: str, name: str) -> float:
    """The largest value of a figure of SGLang's."""
    found = re.findall(rf"^sglang:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return max(map(float, found))


def test_metrics_have_the_labels_and_buckets_asked_for(server: Server, prompts: list[list[int]]) -> None:
    generate(server, prompts[0])
    text = metrics(server)
    [buckets] = [set(re.findall(r'sglang:time_to_first_token_seconds_bucket{[^}]*le="([^"]+)"', text))]
    assert buckets == {"0.25", "0.5", "+Inf"}
    assert 'site="here"' in text


def test_a_full_queue_refuses_a_request_and_names_itself(server: Server, prompts: list[list[int]]) -> None:
    def ask(number: int) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        return server.post("/generate", {"input_ids": [number, *prompts[0]], "sampling_params": sampling})

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) >= 10
    assert refused and all("queue" in answer.text for answer in refused)


def test_requests_are_logged_and_measured_in_files(
    server: Server, folder: Path, prompts: list[list[int]]
) -> None:
    generate(server, prompts[0], rid="the one to look for")
    logged = "".join(path.read_text() for path in (folder / "requests").iterdir())
    assert "the one to look for" in logged
    found: list[str] = []
    # Figures are written behind the answer.
    for _ in range(100):
        measured = "".join(path.read_text() for path in (folder / "metrics").iterdir())
        if found := [line for line in measured.splitlines() if "the one to look for" in line]:
            break
        time.sleep(0.1)
    assert [json.loads(line)["completion_tokens"] for line in found] == [TOKENS]


def test_a_stored_response_is_found_again(server: Server) -> None:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 5, "temperature": 0, "store": True}
    made = server.post("/v1/responses", body)
    assert made.status_code == 200, made.text
    url = f"{server.url}/v1/responses/{made.json()['id']}"
    found = requests.get(url, headers=server.headers, timeout=60).json()
    assert found["output"] == made.json()["output"]


def test_new_weights_are_served_and_the_old_ones_again(
    server: Server, tmp_path: Path, plain: list[tuple], prompts: list[list[int]]
) -> None:
    # SGLang takes the folder for the model's name from here on.
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tensors = load_file(TINY / "model.safetensors")
    name = "language_model.lm_head.weight"
    tensors[name] = tensors[name].roll(1, 0).contiguous()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for folder, version, shift in ((other, "eight", 1), (TINY, "seven", 0)):
        body = {"model_path": str(folder), "weight_version": version}
        answer = server.post("/update_weights_from_disk", body)
        assert answer.status_code == 200 and answer.json()["success"], answer.text
        info = requests.get(f"{server.url}/model_info", headers=server.headers, timeout=60).json()
        assert info["weight_version"] == version
        first = generate(server, prompts[0])["output_ids"][0]
        assert first == (plain[0][0][0] + shift) % 2048
    assert told(server.answer(prompts[0], TOKENS)) == plain[0]


def test_another_grammar_backend_binds_an_answer_too(inert: Server, prompts: list[list[int]]) -> None:
    grammar, shape = GRAMMARS["regex"]
    sampling = {"regex": grammar, "ignore_eos": False, "temperature": 1.0, "sampling_seed": 3}
    texts = [generate(inert, ids, 64, sampling=sampling)["text"] for ids in prompts]
    assert all(re.fullmatch(shape, text) for text in texts), texts


def test_a_chat_tells_its_ids(server: Server) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "temperature": 0,
    }
    told_ids = server.post("/v1/chat/completions", body).json()["sglext"]
    direct = generate(server, told_ids["input_ids"], 5, sampling={"ignore_eos": False})
    assert [direct["output_ids"]] == told_ids["output_ids"] and len(told_ids["input_ids"]) > 5


def test_requests_are_kept_when_the_scheduler_dies(
    server: Server, folder: Path, prompts: list[list[int]]
) -> None:
    """The last of the file: it ends the server."""
    generate(server, prompts[0], rid="before the crash")
    children = psutil.Process(server.process.pid).children(recursive=True)
    [scheduler] = [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]
    scheduler.send_signal(signal.SIGKILL)
    server.process.wait(60)
    dumps = list((folder / "crash").rglob("crash_dump_*.pkl"))
    assert dumps and b"before the crash" in dumps[0].read_bytes()
