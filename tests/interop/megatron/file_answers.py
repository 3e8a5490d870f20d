"""Questions about checkpoints in files whose answers Megatron-Core gives too, on gloo ranks.

Runs with either package, and writes the answers as JSON::

    python file_answers.py megatron.core.dist_checkpointing FILE [install]

With ``install`` this package takes Megatron-Core's place. Each question has a folder of its own. An
answer is text, as in ``tests/helpers/same_answers.py``; those of two ranks are a list.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typing_extensions

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
typing.override = typing_extensions.override  # wheels for Python 3.12 import it
import gpt  # noqa: E402

from tests.helpers.same_answers import plain  # noqa: E402

Question = tuple[str, Callable[[Path], Any]]


class Package:
    """The modules of a package, and states for this rank."""

    def __init__(self, name: str) -> None:
        self.name, self.rank, self.world = name, dist.get_rank(), dist.get_world_size()

    def __call__(self, module: str) -> Any:
        """A module of the package, or the package itself."""
        return importlib.import_module(f"{self.name}.{module}" if module else self.name)

    def tensor(self, key: str, *shape: int, replicated: bool = False, **more: Any) -> Any:
        """This rank's half of a tensor, or a copy of its first half."""
        make = self("mapping").ShardedTensor.from_rank_offsets
        data = torch.arange(2.0 * torch.Size(shape).numel()).reshape(2, *shape)
        if replicated:
            return make(key, data[0], replica_id=self.rank, **more)
        return make(key, data[self.rank], (0, self.rank, self.world), **more)

    def thing(self, key: str, value: Any = "v", **more: Any) -> Any:
        """An object that each rank has, and rank 0 saves."""
        return self("mapping").ShardedObject(key, value, (1,), (0,), replica_id=self.rank, **more)

    def state(self) -> dict[str, Any]:
        """Two tensors and an object."""
        return {
            "w": self.tensor("w", 2, 3),
            "m": {"b": self.tensor("m.b", 4), "o": self.thing("o")},
        }

    def save(self, place: Path, state: Any = None, strategy: Any = None, **options: Any) -> Path:
        """Save the state; by default that one and a common value, as ``torch_dist``."""
        place.mkdir(exist_ok=True)
        dist.barrier()
        strategies = self("strategies.torch")
        strategy = strategy or strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
        state = {**self.state(), "step": 3} if state is None else state
        self("").save(state, str(place), strategy, **options)
        dist.barrier()
        return place

    def load(self, place: Path, state: Any = None, *arguments: Any, **options: Any) -> Any:
        """Load the state, by default :meth:`state`."""
        state = self.state() if state is None else state
        return self("").load(state, str(place), *arguments, **options)

    def alone(self, change: Callable[[], Any]) -> None:
        """Rank 0 does it; both raise its error."""
        failed: list[Any] = [None]
        try:
            if self.rank == 0:
                change()
        except Exception as error:
            failed = [error]
        dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise failed[0]


def questions(ask: Package) -> Iterator[Question]:
    """Those about errors are for one rank: where only some ranks fail, Megatron-Core's others wait
    for them."""
    if ask.world == 1:
        yield from errors(ask)
    else:
        yield from metadata(ask)
        yield from strategies(ask)


def errors(ask: Package) -> Iterator[Question]:
    """Which errors a load raises."""

    def files(place: Path) -> list[Path]:
        return sorted(place.glob("*.distcp"))

    spoil: dict[str, Callable[[Path], Any]] = {
        "that is whole": lambda place: None,
        "without its files": lambda place: [path.unlink() for path in files(place)],
        "with truncated files": lambda place: [
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) for path in files(place)
        ],
        "without .metadata": lambda place: (place / ".metadata").unlink(),
        "with damaged .metadata": lambda place: (place / ".metadata").write_bytes(b"nothing"),
        "without metadata.json": lambda place: (place / "metadata.json").unlink(),
        "with damaged metadata.json": lambda place: (place / "metadata.json").write_text("{"),
        "of an unknown backend": lambda place: (place / "metadata.json").write_text(
            '{"sharded_backend": "x", "sharded_backend_version": 1}'
        ),
        "without common.pt": lambda place: (place / "common.pt").unlink(missing_ok=True),
    }
    for name, change in spoil.items():

        def spoilt(place: Path, change: Any = change) -> Any:
            ask.save(place)
            ask.alone(lambda: change(place))
            return ask.load(place)

        yield f"a checkpoint {name}", spoilt
    wanted: dict[str, Callable[[], Any]] = {
        "a key that is not stored": lambda: {"q": ask.tensor("q", 2, 3)},
        "an object that is not stored": lambda: {"q": ask.thing("q")},
        "another shape": lambda: {"w": ask.tensor("w", 2, 4)},
        "another number of axes": lambda: {"w": ask.tensor("w", 6)},
        "another shape, which may differ": lambda: {
            "w": ask.tensor("w", 3, 3, allow_shape_mismatch=True)
        },
        "another data type": lambda: {
            "w": ask("mapping").ShardedTensor.from_rank_offsets(
                "w", torch.zeros(2, 3, dtype=torch.int32), (0, ask.rank, ask.world)
            )
        },
        "a new tensor": lambda: {"w": without(ask.tensor("w", 2, 3))},
        "a part twice": lambda: {"w": ask.tensor("w", 2, 3), "v": ask.tensor("w", 2, 3)},
    }

    def without(tensor: Any) -> Any:
        tensor.data = None
        return tensor

    for name, state in wanted.items():

        def load(place: Path, state: Any = state, **options: Any) -> Any:
            return ask.load(ask.save(place), state(), **options)

        yield f"load of {name}", load
    for mode in ("raise_all", "return_all", "return_unexpected", "log_all", "ignore_all", "so-so"):

        def strict(place: Path, mode: str = mode) -> Any:
            state = {"w": ask.tensor("w", 2, 3), "q": ask.tensor("q", 2), "p": ask.thing("p")}
            return ask.load(ask.save(place), state, strict=mode)

        yield f"{mode} on files", strict
    for name, change in {
        "nothing": lambda place: None,
        "the manifest": lambda place: (place / "integrity.json").unlink(),
        "a file": lambda place: files(place)[0].unlink(),
        "a byte": lambda place: files(place)[0].write_bytes(
            b"x" + files(place)[0].read_bytes()[1:]
        ),
    }.items():

        def verified(place: Path, change: Any = change) -> Any:
            ask.save(place, verify_integrity=True)
            change(place)
            return ask.load(place, verify_integrity=True)

        yield f"verified load, {name} changed", verified
    part = ask("mapping").ShardedTensor.from_rank_offsets
    wrong: dict[str, Callable[[], Any]] = {
        "a missing part": lambda: {"w": part("w", torch.ones(2), (0, 0, 2))},
        "a part twice": lambda: {"w": part("w", torch.ones(2)), "v": part("w", torch.ones(2))},
        "a copy alone": lambda: {"w": part("w", torch.ones(2), replica_id=1)},
        "a missing object": lambda: {"o": ask("mapping").ShardedObject("o", 1, (2,), (0,))},
        "parts of two shapes": lambda: {
            "w": part("w", torch.ones(2), (0, 0, 2)),
            "v": part("w", torch.ones(3), (0, 1, 2)),
        },
        "a common value that cannot be pickled": lambda: {"f": lambda: 1},
        "a common tensor": lambda: {"t": torch.ones(2)},
        "no tensor": lambda: {"step": 1},
    }
    for name, state in wrong.items():

        def saved(place: Path, state: Any = state) -> Any:
            ask.save(place, state())
            return sorted(ask("").load_common_state_dict(str(place)))

        yield f"save of {name}", saved
    yield "save to no folder", lambda place: ask("").save(ask.state(), str(place / "none"))
    yield "save twice", lambda place: ask.load(ask.save(ask.save(place)))
    yield "load from no folder", lambda place: ask.load(place / "none")
    yield "load from an empty folder", lambda place: ask.load(ask.save(place / "x").parent)
    yield "content metadata of nothing", lambda place: ask("").load_content_metadata()

    def content(place: Path) -> Any:
        ask.save(place, content_metadata={"a": 1})
        return ask("").load_content_metadata(str(place))

    yield "content metadata", content
    yield "common state", lambda place: ask("").load_common_state_dict(str(ask.save(place)))
    yield "plain tensors", lambda place: ask("").load_plain_tensors(str(ask.save(place)))


def metadata(ask: Package) -> Iterator[Question]:
    """What a checkpoint is said to hold."""
    for kind in ("tensors", "sharded"):

        def described(place: Path, kind: str = kind) -> Any:
            ask.save(place)
            return getattr(ask("serialization"), f"load_{kind}_metadata")(str(place))

        yield f"{kind} metadata", described

        def flattened(place: Path, kind: str = kind) -> Any:
            make = ask("mapping").ShardedTensor.from_rank_offsets_flat
            part = slice(0, 4) if ask.rank == 0 else slice(4, 6)
            data = torch.arange(6.0)[part]
            ask.save(place, {"f": make("f", data, (2, 3), flattened_range=part)})
            return getattr(ask("serialization"), f"load_{kind}_metadata")(str(place))

        yield f"{kind} metadata of flattened tensors", flattened
    golden = str(
        Path(__file__).parents[2] / "golden" / "megatron-core-0.15.3-torch_dist" / "tp2dp1"
    )

    def of_golden(place: Path) -> Any:
        found = ask("serialization").load_tensors_metadata(golden)
        return {key: value for key, value in found.items() if "exp_avg." in key}

    yield "tensors metadata of flattened tensors of 0.15.3", of_golden

    def removed(place: Path, hint: str | None = "m.", prefix: str = "m.") -> Any:
        strategy = ask("strategies.torch").TorchDistSaveShardedStrategy(
            "torch_dist", 1, separation_hint=hint
        )
        ask.save(place, strategy=strategy)
        ask.alone(lambda: ask("").remove_sharded_tensors(str(place), prefix))
        left = ask("serialization").load_sharded_metadata(str(place))
        left = {key: value for key, value in left.items() if "common_state" not in key}
        names = sorted({path.name.split("__")[0] for path in place.glob("*.distcp")})
        return [left, names, ask.load(place, {"w": ask.tensor("w", 2, 3)})]

    yield "remove_sharded_tensors", removed
    yield "remove_sharded_tensors of no file", lambda p: removed(p, None)
    yield "remove_sharded_tensors of another key", lambda p: removed(p, "m.", "q.")


def strategies(ask: Package) -> Iterator[Question]:
    """Strategies: their defaults, their files, what they cache and what they send on."""
    serialization = ask("serialization")
    for name in ("sharded", "common"):
        for arguments in (
            (),
            ("torch_dist",),
            ("torch_dist", 1),
            ("torch_dist", 2),
            ("x",),
            ("x", 1),
        ):

            def default(place: Path, name: str = name, arguments: Any = arguments) -> Any:
                found = getattr(serialization, f"get_default_save_{name}_strategy")(*arguments)
                return [found.backend, found.version]

            if not (name == "common" and arguments):
                yield f"default {name} strategy of {arguments}", default

    def many() -> dict[str, Any]:
        return {str(n): ask.tensor(f"t.{n}", 8, 3) for n in range(6)}

    def saving(**options: Any) -> Any:
        return ask("strategies.torch").TorchDistSaveShardedStrategy("torch_dist", 1, **options)

    for name, options in {
        "by default": {},
        "in three threads": {"thread_count": 3},
        "with a hint": {"separation_hint": "t.1"},
    }.items():

        def files(place: Path, options: Any = options) -> Any:
            ask.save(place, many(), saving(**options))
            return sorted(path.name for path in place.glob("*.distcp"))

        yield f"files {name}", files

    def default_files(place: Path) -> Any:
        strategy = serialization.get_default_save_sharded_strategy("torch_dist")
        ask.save(place, many(), strategy)
        return sorted(path.name for path in place.glob("*.distcp"))

    yield "files of the default strategy", default_files

    def cached(place: Path, *states: Any) -> Any:
        strategy = saving(cached_metadata=True)
        found = []
        for number, state in enumerate(states):
            where = ask.save(place / str(number), state(), strategy)
            found.append(ask.load(where, state()))
        return found

    same = (ask.state,) * 4
    yield "saves with cached metadata", lambda place: cached(place, *same)
    yield "other saves with cached metadata", lambda place: cached(place, *same, many, ask.state)

    for algorithm in ("broadcast", "gather_rounds", "gather_object"):

        def parallel(place: Path, algorithm: str = algorithm) -> Any:
            state = {
                "w": ask.tensor("w", 2, 3),
                "r": [ask.tensor(f"r.{n}", 2, replicated=True) for n in range(4)],
                "o": ask.thing("o", {"x": [1, 2]}),
                "mine": ask("mapping").ShardedObject("mine", ask.rank, (2,), (ask.rank,)),
            }
            ask.save(place, state)
            strategy, reads = recording(ask)
            with gpt.OnCpu():
                wrapper = ask("strategies.fully_parallel").FullyParallelLoadStrategyWrapper(
                    strategy, None, False, algorithm
                )
                loaded = ask.load(place, state, wrapper)
            return [loaded, sorted(reads)]

        yield f"fully parallel load, {algorithm}", parallel


def recording(ask: Package) -> tuple[Any, list[str]]:
    """A strategy for loading, and the unique keys of the objects that it was asked for."""
    reads: list[str] = []
    base = ask("strategies.torch").TorchDistLoadShardedStrategy

    class Recording(base):  # type: ignore[misc]
        def load(self, sharded_state_dict: Any, *arguments: Any, **options: Any) -> Any:
            values = ask("dict_utils").nested_values(sharded_state_dict)
            reads.extend(value.unique_key for value in values if hasattr(value, "unique_key"))
            return super().load(sharded_state_dict, *arguments, **options)

    return Recording(), reads


def ordered(value: Any) -> Any:
    """A value whose dicts have their keys in order, which is no part of an answer."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [ordered(item) for item in value]
    return value


def begin(rank: int, world: int, folder: str) -> None:
    """Join the ranks, which find each other in a folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    meet = f"file://{folder}/meet-{world}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)


def one_rank(rank: int, world: int, package: str, folder: str) -> None:
    """Ask each question in a folder of its own."""
    begin(rank, world, folder)
    found = {}
    for number, (name, ask) in enumerate(questions(Package(package))):
        place = Path(folder, f"{world}-{number}")
        place.mkdir(exist_ok=True)
        dist.barrier()
        try:
            answer = plain(ordered(ask(place)))
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = f"raises {' '.join(kinds[: kinds.index('BaseException')])}"
        answers: list[Any] = [None] * world
        dist.all_gather_object(answers, answer)
        found[name] = answers[0] if len(set(answers)) == 1 else answers
    if rank == 0:
        Path(folder, f"answers-{world}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def start(target: Callable[..., None], world: int, folder: str) -> None:
    """Run a function on ranks of the package that the command line names."""
    package, _, *install = sys.argv[1:]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    if install:
        from shardstore.megatron import install as install_it

        install_it("torch_dist")
    importlib.import_module(f"{package}.serialization")
    mp.start_processes(target, (world, package, folder), nprocs=world, start_method="fork")


def main() -> None:
    """Command line: the package, the file for the answers, and ``install``."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            start(one_rank, world, folder)
            found |= json.loads(Path(folder, f"answers-{world}").read_text())
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
