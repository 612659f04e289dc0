"""Load on the real gateway over HTTP, and what is made of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rag_service.cli import app
from rag_service.load import LoadPlan, LoadResult, Question, Sample, run_load
from rag_service.load_html import load_html_of
from rag_service.load_questions import QuestionsError, mixed, read_questions
from rag_service.load_report import load_report
from tests.fakes import Fakes
from tests.rag_service.conftest import MODEL, MakeSettings, serving
from tests.rag_service.test_report_html import Outline

QUESTIONS = tuple(Question(f"When does library {n} open?", "general") for n in range(6))
ARMS: dict[str, dict[str, Any]] = {name: {"speculation": {"mode": name}} for name in ("auto", "off")}


def plan_of(url: str = "http://127.0.0.1:1", **changes: Any) -> LoadPlan:
    values: dict[str, Any] = {
        "num_questions": 6,
        "arms": ARMS,
        "num_warmup": 1,
        "questions": QUESTIONS,
    } | changes
    return LoadPlan(url, MODEL, **values)


async def test_every_question_is_asked_in_every_arm(address: str, fakes: Fakes) -> None:
    seen: list[Sample] = []
    result = await run_load(plan_of(address, concurrency=2), seen.append)
    assert len(seen) == len(result.samples) == 12
    assert {(sample.arm, sample.pair) for sample in seen} == {(arm, n) for arm in ARMS for n in range(6)}
    assert not [sample.error for sample in seen if sample.error]
    sample = seen[0]
    assert sample.text
    assert sample.num_tokens > 0
    assert sample.first_token_seconds is not None
    assert sample.first_token_seconds <= sample.total_seconds
    assert "decode_seconds" in sample.timings
    # The mode reaches the target, and the two warm-up requests are counted nowhere.
    modes = [request.mode for request in fakes.generator.requests]
    assert len(modes) == 14
    assert modes.count("off") == 7


async def test_concurrency_is_kept(address: str, fakes: Fakes) -> None:
    running: list[int] = []
    fakes.generator.delay_seconds = 0.005
    fakes.generator.on_request = lambda request: running.append(fakes.generator.num_running)
    await run_load(plan_of(address, concurrency=3, num_questions=12))
    assert max(running) == 3


async def test_open_loop_counts_from_when_a_request_was_due(address: str, fakes: Fakes) -> None:
    """One slow slot and arrivals far faster: waiting for the slot belongs to the latency."""
    fakes.generator.delay_seconds = 0.1
    fakes.generator.text = "Yes."
    plan = plan_of(address, concurrency=1, rate=500.0, num_questions=4, arms={"auto": ARMS["auto"]})
    result = await run_load(plan)
    slowest = max(sample.total_seconds for sample in result.samples)
    assert slowest > 0.35


async def test_errors_are_counted_by_code(make_settings: MakeSettings, fakes: Fakes) -> None:
    settings = make_settings(service__domains=["general"])
    async with serving(settings, fakes) as address:
        plan = plan_of(address, questions=(Question("When?", "cooking"), Question("When?", "general")))
        report = load_report(await run_load(plan))
    assert report["num_errors"] == 6
    assert report["arms"]["off"]["errors"] == {"http_400": 3}
    assert report["arms"]["off"]["num_good"] == 3
    gone = load_report(await run_load(plan_of()))
    assert gone["arms"]["auto"]["errors"] == {"ConnectError": 6}
    assert gone["arms"]["auto"]["latency_seconds"]["p50"] is None
    assert load_html_of(gone)


async def test_a_refused_request_comes_back_when_told_to(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.generator.delay_seconds = 0.02
    questions = {"num_questions": 4, "concurrency": 2, "num_warmup": 0, "arms": {"auto": {}}}
    async with serving(make_settings(limits={"max_in_flight": 1}), fakes) as address:
        refused = (await run_load(plan_of(address, **questions))).samples
        returned = (await run_load(plan_of(address, **questions, num_retries=50))).samples
    assert {sample.error for sample in refused} == {None, "http_429"}
    assert all((sample.error is None) == (not sample.retry_after_seconds) for sample in refused)
    assert {sample.error for sample in returned} == {None}
    assert any(sample.retry_after_seconds for sample in returned)


async def test_an_open_loop_of_one_arm_does_not_wait_for_its_own_queue(address: str, fakes: Fakes) -> None:
    running: list[int] = []
    fakes.generator.delay_seconds = 0.02
    fakes.generator.on_request = lambda request: running.append(fakes.generator.num_running)
    await run_load(plan_of(address, arms={"auto": {}}, rate=500.0, num_questions=24, concurrency=24))
    # 24 requests due within a twentieth of a second are all under way before one of them is through.
    assert max(running) > 16


async def test_time_limit_ends_the_run(address: str) -> None:
    result = await run_load(plan_of(address, max_seconds=0.0))
    assert result.ended_early
    assert load_report(result)["num_requests"] == 0


def sample_of(arm: str, pair: int, decode: float, accepted: int = 0, **changes: Any) -> Sample:
    speculation = {
        "acceptance_rate": accepted / (accepted + 2) if accepted else None, "num_rounds": 10,
        "num_draft_tokens": 20 if accepted else 0, "num_accepted_draft_tokens": accepted,
        "num_rejections": 2 if accepted else 0, "acceptance_method": "token",
    }  # fmt: skip
    values: dict[str, Any] = {
        "domain": "legal", "total_seconds": decode + 1, "first_token_seconds": 0.5, "text": "same",
        "num_tokens": 30, "timings": {"decode_seconds": decode}, "speculation": speculation | changes,
    }  # fmt: skip
    return Sample(arm, pair, **values)


def test_figures_by_hand() -> None:
    samples = [sample_of("off", n, 3.0 + n % 3) for n in range(30)]
    samples += [sample_of("auto", n, (3.0 + n % 3) / 2, accepted=8) for n in range(29)]
    samples.append(Sample("auto", 29, "legal", 9.0, "timeout"))
    report = load_report(LoadResult(plan_of(), samples, {"auto": 60.0, "off": 120.0}, False))
    auto = report["arms"]["auto"]
    assert auto["tokens_per_second"] == pytest.approx(29 * 30 / 60)
    assert auto["errors"] == {"timeout": 1}
    assert auto["acceptance_rate"] == pytest.approx(0.8)
    assert auto["domains"]["legal"]["mean_acceptance_length"] == pytest.approx(1.8)
    assert report["arms"]["off"]["acceptance_rate"] is None
    assert auto["stage_seconds"]["decode"]["p50"] == pytest.approx(2.0)
    low, high = auto["latency_seconds"]["p50_interval"]
    assert low <= auto["latency_seconds"]["p50"] <= high
    paired = report["paired"]["auto"]
    assert paired["num_pairs"] == 29
    assert paired["same_text"] == 1.0
    # Every pair is exactly twice as fast, so resampling pairs leaves no doubt.
    assert paired["decode_speed_up"]["value"] == pytest.approx(2.0)
    assert paired["decode_speed_up"]["interval"] == pytest.approx([2.0, 2.0])
    assert paired["end_to_end_speed_up"]["value"] < 2.0
    json.dumps(report, allow_nan=False)
    page = Outline(load_html_of(report))
    assert "Speed-up over plain decoding, same questions" in page.text
    assert any(text.startswith("2.00") for text in page.text)


def test_lossy_and_block_acceptance_are_named() -> None:
    samples = [sample_of("auto", n, 1.0, accepted=8, acceptance_method="typical") for n in range(4)]
    report = load_report(LoadResult(plan_of(), samples, {"auto": 1.0, "off": 0.0}, False))
    assert report["arms"]["auto"]["acceptance_rate"] is None
    assert report["arms"]["auto"]["lossy"] is True
    samples = [
        sample_of("auto", n, 1.0, 8, acceptance_method="block", acceptance_rate=0.5 + n / 10)
        for n in range(4)
    ]
    report = load_report(LoadResult(plan_of(), samples, {"auto": 1.0, "off": 0.0}, False))
    assert report["arms"]["auto"]["estimator"] == "mean_overlap_of_requests"
    assert report["arms"]["auto"]["acceptance_rate"] == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": ()}, "nothing to ask"),
        ({"concurrency": 0}, "concurrency must lie"),
        ({"concurrency": 10_000}, "concurrency must lie"),
        ({"rate": -1.0}, "rate must lie"),
        ({"num_questions": 10**9}, "100000 at most"),
    ],
)
def test_load_is_bounded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


def test_questions_are_read_and_mixed(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    lines = [{"question": f"{d}{n}?", "domain": d} for d in ("legal", "medical") for n in range(5)]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"question": "alone?"}]) + "\n\n")
    questions = read_questions([path])
    assert len(questions) == 11
    found = mixed(questions, ["legal", "medical"], 3, seed=1)
    assert [question.domain for question in found] == ["legal", "medical"] * 3
    assert found == mixed(questions, ["legal", "medical"], 3, seed=1)
    with pytest.raises(QuestionsError, match="no questions of the domain finance"):
        mixed(questions, ["finance"], None, 0)
    for content in ('{"answer": 1}', "[1]", "{", '{"question": " "}', '{"question": "x", "domain": 3}'):
        path.write_text(content)
        with pytest.raises(QuestionsError, match="line 1"):
            read_questions([path])
    path.write_text("\n")
    with pytest.raises(QuestionsError, match="no questions"):
        read_questions([path])
    with pytest.raises(QuestionsError, match=r"nowhere.* cannot be read"):
        read_questions([tmp_path / "nowhere"])


@pytest.fixture
def service(make_settings: MakeSettings, fakes: Fakes) -> Iterator[str]:
    """The gateway in a thread of its own, for the command, which runs a loop of its own."""
    found: list[str] = []
    started, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with serving(make_settings(), fakes) as address:
            found.append(address)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(20)
    yield found[0]
    stop.set()
    thread.join()


def test_command(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path, page = tmp_path / "q.jsonl", tmp_path / "load.html"
    path.write_text("\n".join(json.dumps({"question": q.text, "domain": q.domain}) for q in QUESTIONS))
    arguments = ["bench", "--url", service, "--questions", str(path), "--concurrency", "2"]
    done = CliRunner().invoke(app, [*arguments, "--html", str(page), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["arms"]["off"]["num_good"] == 6
    assert report["paired"]["auto"]["num_pairs"] == 6
    assert "<svg" in page.read_text()
    done = CliRunner().invoke(app, [*arguments, "--mode", "passages", "--count", "2"])
    assert done.exit_code == 0, done.output
    assert "closed loop of 2" in done.output
    for wrong, message in (
        (["--mode", "magic"], "There is no mode magic"),
        (["--rate", "-3"], "rate must lie"),
        (["--url", "http://10.0.0.1:8000"], "another machine"),
        (["--domain", "cooking"], "no questions of the domain cooking"),
    ):
        done = CliRunner().invoke(app, [*arguments, *wrong])
        assert done.exit_code == 2, done.output
        assert message in done.output
