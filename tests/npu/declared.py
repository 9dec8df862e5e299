"""What a step of decode or verify may ask of the host, each with its reason. Anything else fails tier (c)."""

from __future__ import annotations

from tests.npu.emulator import Log, Note

DECLARED = {
    ("allocator_npu.py", "alloc_extend"): "SGLang's page allocator asks the device how many pages to take",
    ("batch_result_processor.py", "process_batch_result_decode"): "the tokens of the step before are read",
    ("broken_requests.py", "read"): "with them, whether a request's logits broke (it is copied already)",
    ("dflash_info_v2.py", "prepare_for_decode"): "SGLang sends the lengths it allocated for",
    ("checkpoints.py", "decode_checkpoint"): "SGLang sends the slots that checkpoints go to",
    ("ascend_lengths.py", "__init__"): "each request's lengths, for fused-infer attention alone",
    ("ascend_lengths.py", "__call__"): "they are waited for by the first layer that attends",
    ("ascend_records.py", "look"): "one byte: whether records were found stale",
    ("broken_requests.py", "__init__"): "one byte a request: whether its logits broke",
    ("broken_requests.py", "mark_broken"): "SGLang's copy of the step's tokens, inside our hook",
    ("schedule_batch.py", "prepare_for_decode"): "SGLang sends which requests keep a checkpoint",
}


def reason(note: Note) -> str | None:
    """Why this may happen; None if nobody declared it."""
    lines = [part.rpartition("/")[2] for part in note.where.split(" < ")]
    for file, function in DECLARED:
        if any(line.startswith(f"{file}:") and line.endswith(f" {function}") for line in lines):
            return DECLARED[file, function]
    return None


def undeclared(log: Log) -> list[Note]:
    return [note for note in (*log.waits, *log.copies, *log.fallbacks) if reason(note) is None]


def report(log: Log) -> str:
    lines = [f"{log.launches} launches"]
    for note in (*log.waits, *log.copies, *log.fallbacks):
        lines.append(f"  {note.kind} {note.what} {note.bytes or ''}: {reason(note)} ({note.where})")
    return "\n".join(lines)
