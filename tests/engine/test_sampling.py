"""Words become token sequences; choices are ranked."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.sampling import bad_word_tokens, best_choices
from paceline.errors import RequestError
from paceline.model.dummy import dummy_tokenizer
from paceline.runner.extras import banned_words

from .test_detokenizer import smollm2


def test_a_word_is_banned_with_and_without_a_space_before_it() -> None:
    tokenizer = smollm2()
    sequences = bad_word_tokens(["exaggerated"], tokenizer)
    assert {tokenizer.decode(one) for one in sequences} == {"exaggerated", " exaggerated"}
    assert len({len(one) for one in sequences}) == 2    # the forms differ in how many tokens they take


def test_a_word_that_gives_no_tokens_is_refused() -> None:
    for word in ("", "  "):
        with pytest.raises(RequestError, match="bad_words"):
            bad_word_tokens(["fine", word], dummy_tokenizer(300))


def test_words_may_be_token_ids() -> None:
    assert bad_word_tokens([[3, 4], (5,)], dummy_tokenizer(300)) == ((3, 4), (5,))


@pytest.mark.parametrize(("output", "banned"), [
    ([], [9]), ([1], [9, 2]), ([1, 2], [9, 3]), ([7, 1, 2], [9, 3]), ([2], [9]), ([2, 1], [9, 2])])
def test_the_token_that_would_complete_a_word_is_banned(output: list[int], banned: list[int]) -> None:
    assert banned_words([(9,), (1, 2), (1, 2, 3)], np.array(output, np.int32)) == banned


def test_the_best_choices_are_the_likeliest_per_token_and_of_equals_the_first() -> None:
    logprobs = [[-2.0], [-1.0, -1.0, -1.0], [-1.0], [-0.5, -3.0]]
    assert best_choices(logprobs, 2) == [1, 2]
    assert best_choices(logprobs, 4) == [1, 2, 3, 0]
