"""Which choices belong to which request. Owns the family tree; the scheduler owns the requests themselves.

A request with num_choices > 1 is choice 0; the others are born when its prompt is computed up to the last token, under
ids agreed from the start, so that nobody else can take them and an abort can name them before they exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request


def choice_id(parent_id: str, choice_index: int) -> str:
    """The id under which a choice reports: the parent's own for choice 0."""
    return parent_id if choice_index == 0 else f"{parent_id}:{choice_index}"


class Choices:
    """Unborn and living choices by parent."""

    def __init__(self) -> None:
        self._unborn: dict[str, dict[str, int]] = {}      # parent id -> choice id -> choice index
        self._parent_of_unborn: dict[str, str] = {}
        self._living: dict[str, dict[str, None]] = {}     # parent id -> ids of its children, in order of birth

    def expect(self, parent: Request) -> None:
        if parent.num_choices > 1:
            indexes = {choice_id(parent.request_id, index): index for index in range(1, parent.num_choices)}
            self._unborn[parent.request_id] = indexes
            self._parent_of_unborn.update(dict.fromkeys(indexes, parent.request_id))

    @property
    def has_unborn(self) -> bool:
        return bool(self._unborn)

    def is_expecting(self, request: Request) -> bool:
        return request.num_choices > 1 and request.request_id in self._unborn

    def is_reserved(self, request_id: str) -> bool:
        return request_id in self._parent_of_unborn

    def bear(self, parent: Request) -> list[Request]:
        """The expected choices as requests that have computed nothing yet."""
        indexes = self._unborn.pop(parent.request_id)
        children = [_choice_of(parent, child_id, index) for child_id, index in indexes.items()]
        for child in children:
            del self._parent_of_unborn[child.request_id]
            self.add(parent.request_id, child.request_id)
        return children

    def add(self, parent_id: str, child_id: str) -> None:
        self._living.setdefault(parent_id, {})[child_id] = None

    def descendants(self, request_id: str) -> list[str]:
        """Ids of all living choices under this request, which itself may have ended."""
        found: list[str] = []
        for child_id in self._living.get(request_id, ()):
            found += [child_id, *self.descendants(child_id)]
        return found

    def cancel_unborn(self, child_ids: Iterable[str]) -> list[tuple[str, str, int]]:
        """Those of these ids that were still expected, and are no more: parent id, child id, choice index."""
        cancelled = [(child_id, self._cancel(child_id)) for child_id in child_ids]
        return [(found[0], child_id, found[1]) for child_id, found in cancelled if found is not None]

    def _cancel(self, child_id: str) -> tuple[str, int] | None:
        """This choice shall not be born. Returns its parent's id and its index, None where none was expected."""
        parent_id = self._parent_of_unborn.pop(child_id, None)
        if parent_id is None:
            return None
        indexes = self._unborn[parent_id]
        choice_index = indexes.pop(child_id)
        if not indexes:
            del self._unborn[parent_id]
        return parent_id, choice_index

    def unborn(self, parent_id: str) -> tuple[str, ...]:
        return tuple(self._unborn.get(parent_id, ()))

    def ended(self, request: Request) -> None:
        """A living choice has ended."""
        siblings = self._living.get(request.parent_id) if request.parent_id is not None else None
        if siblings is not None and request.parent_id is not None:
            siblings.pop(request.request_id, None)
            if not siblings:
                del self._living[request.parent_id]


def _choice_of(parent: Request, request_id: str, choice_index: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=parent.prompt_token_ids,
        sampling=parent.sampling,
        arrival_time=parent.arrival_time,
        tenant=parent.tenant,
        priority=parent.priority,
        deadline=parent.deadline,
        cache_extras=parent.cache_extras,
        parent_id=parent.request_id,
        prompt_index=parent.prompt_index,
        choice_index=choice_index,
        program_id=parent.program_id,
    )
