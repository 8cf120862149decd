"""More sources with one mistake each, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from broken_rewards import LEFT
from simple_sources import Rows

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows, PromptRow
from rlplug.errors import ConfigError

# ---- process and machine --------------------------------------------------------------------------------------------


class LeavesReadersOpen(Rows):
    def row(self, index: int) -> Any:
        if index == 0:
            LEFT.append(Path("/dev/null").open())  # noqa: SIM115 - that is the mistake
        return super().row(index)


class UnpacksEachTime(Rows):
    def row(self, index: int) -> Any:
        if index == 0:
            LEFT.append(Path(tempfile.mkdtemp()))
        return super().row(index)


class ReadsAhead(Rows):
    """A thread that a reader does not end which stops early."""

    def rows(self) -> Any:
        ends = threading.Event()
        LEFT.append(ends)
        threading.Thread(target=ends.wait, daemon=True).start()
        yield from super().rows()
        ends.set()


class WritesAnIndex(Rows):
    def row(self, index: int) -> Any:
        Path("rows.idx").write_text(f"{index}")
        return super().row(index)


class GoesToItsFolder(Rows):
    def row(self, index: int) -> Any:
        if index == 0:
            here = Path.cwd()
            os.chdir(here.parent if "mistakes" in here.name else next(here.glob("mistakes*"), here))
        return super().row(index)


class SetsTheHubOffline(Rows):
    def row(self, index: int) -> Any:
        os.environ["HF_HUB_OFFLINE"] = f"{1 + index}"
        return super().row(index)


# ---- the same input, the same result --------------------------------------------------------------------------------


class OrdersASet(Rows):
    def rows(self) -> Any:
        rows = {row.uid: row for row in super().rows()}
        return (rows[uid] for uid in set(rows))


class HashesUids(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{hash(f'{index}>')}", f"{index}>", str(index), {})


class TakesOneReader(Rows):
    """A second reader fails while the first one reads."""

    is_read = False

    def rows(self) -> Any:
        if self.is_read:
            raise RuntimeError("locked by another reader")
        self.is_read = True
        try:
            yield from super().rows()
        finally:
            self.is_read = False


class EndsEarlierAgain(Rows):
    num_rows = 10

    def rows(self) -> Any:
        num_rows, self.num_rows = self.num_rows, 9
        return itertools.islice(super().rows(), num_rows)


class BeginsAtOne(Rows):
    def row(self, index: int) -> Any:
        return super().row(index + 1)


# ---- claims against effect ------------------------------------------------------------------------------------------


class Prompts(Rows):
    """Its training prompts are of another class."""

    prompts: Any = PromptStream

    def for_training(self, key: str, name: str = "") -> AllRows:
        of = self.prompts

        class Its(AllRows):
            def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
                made: PromptStream = of(encoder.usable(self._key, self.known), shuffle, seed)
                return made

        return Its(self, key, name)


class ForgetsItsPart(Rows):
    def for_training(self, key: str, name: str = "") -> AllRows:
        return AllRows(self, key)


class ForgetsTheKey(Rows):
    def for_training(self, key: str, name: str = "") -> AllRows:
        return AllRows(self, "my rows", name)


class IgnoresTheSeed(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def __init__(self, prompts: Any, shuffle: bool = True, seed: int | str = 0) -> None:
            super().__init__(prompts, shuffle, 0)


class SeedsByAHash(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def __init__(self, prompts: Any, shuffle: bool = True, seed: int | str = 0) -> None:
            super().__init__(prompts, shuffle, hash(f"{seed}"))


class AlwaysShuffles(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def __init__(self, prompts: Any, shuffle: bool = True, seed: int | str = 0) -> None:
            super().__init__(prompts, True, seed)


class HasNoPrompts(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        num_prompts = 0  # type: ignore[assignment]


class IsLongerThanItSays(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        longest_prompt = 1  # type: ignore[assignment]


class LosesOneOfFive(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def take(self, num_prompts: int) -> Any:
            if num_prompts == 5:
                super().take(1)
            return super().take(num_prompts)


class HandsOutItsPlace(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        state: Any = None

        def state_dict(self) -> Any:
            self.state = super().state_dict()
            return self.state

        def take(self, num_prompts: int) -> Any:
            taken = super().take(num_prompts)
            if self.state is not None:
                self.state |= super().state_dict()
            return taken


class ForgetsWhatItLearnt(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        num_easy, most = 0, 1

        def observe(self, samples: Any, gather_arrays: Any) -> None:
            self.num_easy += sum(sample.reward > 0 for sample in samples)

        def take(self, num_prompts: int) -> Any:
            taken = super().take(num_prompts)
            place = min(self.num_easy, self.most)
            return taken[place:] + taken[:place]


class KeepsItsPlaceInAnObject(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def state_dict(self) -> Any:
            return {**super().state_dict(), "position": Decimal(self.position)}


class LearnsOfItsOwnSamples(Prompts):
    class prompts(ForgetsWhatItLearnt.prompts):  # noqa: N801 - in the place of a function
        most = 5

        def state_dict(self) -> Any:
            return {**super().state_dict(), "easy": self.num_easy}

        def load_state_dict(self, state: Any) -> None:
            self.num_easy = state.get("easy", 0)
            super().load_state_dict({key: value for key, value in state.items() if key != "easy"})


class TakesAnyState(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({**state, "fingerprint": self._fingerprint})


class BelongsToNothing(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def state_dict(self) -> Any:
            return {"epoch": self.epoch, "position": self.position, "of": self._fingerprint}

        def load_state_dict(self, state: Any) -> None:
            if "of" not in state:
                raise ConfigError("the state is of another source: name that one again.")
            super().load_state_dict({"fingerprint": state["of"], **state})


class TrainsOnOtherRows(Rows):
    """Trains on what is there where a half of it was asked for."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return AllRows(Rows() if self.path == "half" else self, key, name)


class BeginsAtTheSecond(Prompts):
    class prompts(PromptStream):  # noqa: N801 - in the place of a function
        def _epoch_order(self) -> Any:
            first, *others = super()._epoch_order()
            return [*others, first]


# ---- endless, late, empty -------------------------------------------------------------------------------------------


class HasNoEnd(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("it is not there")
        return map(self.row, itertools.count())


class RepeatsUidsLater(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("it is not there")
        return (self.row(index if index < 250 else 0) for index in range(260))


class FailsLater(Rows):
    def rows(self) -> Any:
        yield from super().rows()
        yield from map(self.row, range(10, 250))
        raise KeyError("prompt")


class WaitsForRows(Rows):
    def row(self, index: int) -> Any:
        time.sleep(0.7)
        return super().row(index)


class FailsWithoutAWord(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("")
        return super().rows()


# ---- hidden hand ----------------------------------------------------------------------------------------------------


class FillsOneDictionary(Rows):
    def rows(self) -> Any:
        fields: dict[str, Any] = {}
        for index, row in enumerate(super().rows()):
            fields["index"] = index
            yield PromptRow(row.uid, row.prompt, row.answer, fields)


class FillsOneMessage(Rows):
    def rows(self) -> Any:
        message = {"role": "user", "content": ""}
        for row in super().rows():
            message["content"] = row.prompt
            yield PromptRow(row.uid, [message], row.answer, {})


class KeepsALock(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", f"{index}>", None, {"lock": threading.Lock()})


class HasNoMetadata(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", f"{index}>", None, None)  # type: ignore[arg-type]


class NamesInTwoLines(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows\n{index}", f"{index}>", None, {})


class NumbersItsMetadata(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", f"{index}>", None, {index: "level"})  # type: ignore[dict-item]


CAUGHT_BY = {
    "LeavesReadersOpen": {"test_readers_leave_nothing_behind"},
    "UnpacksEachTime": {"test_readers_leave_nothing_behind"},
    "ReadsAhead": {"test_readers_leave_nothing_behind"},
    "WritesAnIndex": {"test_the_process_is_left_as_it_was"},
    "GoesToItsFolder": {"test_the_process_is_left_as_it_was"},
    "SetsTheHubOffline": {"test_the_process_is_left_as_it_was"},
    "OrdersASet": {"test_another_process_reads_the_same_rows"},
    "HashesUids": {"test_another_process_reads_the_same_rows"},
    "TakesOneReader": {"test_readers_do_not_share_their_place"},
    "EndsEarlierAgain": {"test_rows_repeat"},
    "BeginsAtOne": {"test_rows_are_the_expected_ones"},
    "ForgetsItsPart": {"test_rows_for_training_are_known_by_their_part"},
    "ForgetsTheKey": {"test_what_cannot_be_read_is_a_configuration_error"},
    "IgnoresTheSeed": {"test_the_seed_gives_the_order"},
    "SeedsByAHash": {"test_another_process_draws_the_same_prompts"},
    "AlwaysShuffles": {"test_the_seed_gives_the_order"},
    "HasNoPrompts": {"test_training_prompts_are_as_they_say"},
    "IsLongerThanItSays": {"test_training_prompts_are_as_they_say"},
    "LosesOneOfFive": {"test_draws_do_not_depend_on_their_size"},
    "HandsOutItsPlace": {"test_a_state_stays_as_it_was"},
    "ForgetsWhatItLearnt": {"test_observed_samples_go_on_too"},
    "LearnsOfItsOwnSamples": {"test_ranks_learn_the_same"},
    "TakesAnyState": {"test_a_state_of_other_prompts_is_refused"},
    "BelongsToNothing": {"test_a_state_of_other_prompts_is_refused"},
    "TrainsOnOtherRows": {"test_what_cannot_train_is_refused"},
    "BeginsAtTheSecond": {"test_training_draws_are_the_expected_ones"},
    "KeepsItsPlaceInAnObject": {"test_training_prompts_go_on_at_their_place"},
    "HasNoEnd": {"test_rows_end"},
    "RepeatsUidsLater": {"test_rows_end"},
    "FailsLater": {"test_rows_end"},
    "WaitsForRows": {"test_rows_can_be_read"},
    "FailsWithoutAWord": {"test_what_cannot_be_read_is_a_configuration_error"},
    "FillsOneDictionary": {"test_rows_are_objects_of_their_own"},
    "FillsOneMessage": {"test_rows_are_objects_of_their_own"},
    "KeepsALock": {"test_rows_are_well_formed"},
    "HasNoMetadata": {"test_rows_are_well_formed"},
    "NamesInTwoLines": {"test_rows_are_well_formed"},
    "NumbersItsMetadata": {"test_rows_are_well_formed"},
}
"""Mistakes, and the checks that find each."""
