"""New weights while requests run: what is recorded was computed with the old ones, and stays so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from tests.speculative.inside.conftest import TINY


def update(loop, folder: Path) -> tuple[bool, str]:
    """SGLang's own request, between two turns; requests and cache stay."""
    message = UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", flush_cache=False)
    answer = loop.tell(message)
    return answer.success, answer.message


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with another vocabulary head."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    shutil.copytree(TINY, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    [head] = [name for name in tensors if name.endswith("lm_head.weight")]
    tensors[head] = tensors[head].roll(1, 0).contiguous()
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_a_tail_from_before_new_weights_is_the_state_it_stands_for(loop, prompt, other):
    """The texts are those of requests whose states were whole when the weights came."""
    pool = loop.scheduler.req_to_token_pool.mamba_pool
    asked = [prompt(40 + 30 * i, seed=i) for i in range(3)]
    texts = []
    for whole in (False, True):
        requests = [loop.admit(f"{whole} {i}", ids, 60) for i, ids in enumerate(asked)]
        while len(requests[-1].output_ids) < 20:
            loop.step()
        if whole:
            rows = (pool.records.tails > 0).nonzero().view(-1)
            pool.records.settle(pool, rows, pool.records.slot[rows])
        assert update(loop, other)[0]
        loop.finish(*requests)
        texts.append([list(request.output_ids) for request in requests])
        loop.flush()
        assert update(loop, TINY)[0]
    assert texts[0] == texts[1]
    unchanged = loop.admit("unchanged", asked[0], 60)
    loop.finish(unchanged)
    assert list(unchanged.output_ids)[:20] == texts[0][0][:20] and list(unchanged.output_ids) != texts[0][0]


def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(loop, prompt, tmp_path):
    alone = loop.admit("alone", prompt(30), 20)
    loop.finish(alone)
    loop.flush()
    folder = tmp_path / "broken"
    shutil.copytree(TINY, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    missing = sorted(tensors)[0]
    del tensors[missing]
    save_file(tensors, file, {"format": "pt"})
    done, message = update(loop, folder)
    assert not done and missing in message
    again = loop.admit("again", prompt(30), 20)
    loop.finish(again)
    assert list(again.output_ids) == list(alone.output_ids)
