"""A row without a usable token ends its own request, and nobody else notices."""

from __future__ import annotations

from paceline.request import FinishReason

from ..fakes import Setup, Stage, make_request, solo

SMALL = Setup(num_blocks=30)


def test_only_the_failed_ends_and_the_others_go_on_exactly() -> None:
    stage = Stage(SMALL)
    requests = [make_request(f"r{i}", 5 + i, 9, salt=i) for i in range(4)]
    stage.add(*requests)
    stage.step()
    stage.executor.failing = {"r1", "r3"}
    stage.run()
    assert stage.reasons == {"r0": FinishReason.LENGTH, "r1": FinishReason.ERROR, "r2": FinishReason.LENGTH,
                             "r3": FinishReason.ERROR}
    assert len(stage.tokens["r1"]) == 1, "what came before the failure stays"
    for request in (requests[0], requests[2]):
        assert stage.tokens[request.request_id] == solo(request, SMALL)
    assert stage.scheduler.stats().num_free_blocks == SMALL.num_blocks


def test_choices_that_wait_for_a_failed_prompt_fail_with_it() -> None:
    stage = Stage(Setup(max_num_batched_tokens=4))
    stage.add(make_request("a", 20, 5, num_choices=3))
    stage.executor.failing = {"a"}    # in the middle of the prompt: the other choices are not born yet
    stage.run()
    assert stage.reasons == dict.fromkeys(("a", "a:1", "a:2"), FinishReason.ERROR)
    assert stage.scheduler.stats().num_free_blocks == stage.setup.num_blocks


def test_a_choice_that_fails_leaves_its_siblings_alone() -> None:
    stage = Stage(SMALL)
    stage.add(make_request("a", 6, 8, num_choices=3))
    stage.step()
    stage.executor.failing = {"a:1"}
    stage.run()
    assert stage.reasons == {"a": FinishReason.LENGTH, "a:1": FinishReason.ERROR, "a:2": FinishReason.LENGTH}
    for index in (0, 2):
        expected = solo(make_request("x", 6, 8, choice_index=index), SMALL)
        assert stage.tokens[f"a:{index}" if index else "a"] == expected


def test_nobody_finds_the_blocks_of_a_failed_request() -> None:
    stage = Stage(SMALL)
    stage.add(make_request("a", 18, 4))
    stage.step()
    stage.executor.failing = {"a"}
    stage.step()
    again = make_request("b", 18, 4)
    stage.add(again)
    stage.run()
    assert stage.finished["b"].num_cached_tokens == 0
    assert stage.tokens["b"] == solo(again, SMALL)


def test_one_who_was_aborted_while_its_row_failed_ends_once() -> None:
    stage = Stage(SMALL)
    stage.add(make_request("a"), make_request("b"))
    plan = stage.schedule()
    stage.abort("a")
    stage.executor.failing = {"a"}
    stage.update(plan)
    assert stage.reasons == {"a": FinishReason.ABORT}
    stage.run()
    assert stage.reasons["b"] is FinishReason.LENGTH
