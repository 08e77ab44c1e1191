# SPDX-License-Identifier: Apache-2.0
"""How far an item has come when something happens to an engine.

Each scene starts one item and comes back when it is exactly that far.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.group.material import Rows
from tests.process import sides
from tests.process.engines import Asked, EncodeEngine, PrefillEngine, item
from tests.process.sides import PROBES
from tests.unit.pair_bench import until

_ATTEMPTS = 20


@dataclass(frozen=True)
class Scene:
    """A request on its way, and where its item is to lie: offset and bytes."""

    asked: Asked
    place: tuple[int, int]

    @property
    def rows(self) -> Rows:
        return self.asked.items[0]


MakeScene = Callable[[PrefillEngine, EncodeEngine, int], Scene]


def before_it_is_offered(prefill: PrefillEngine, encode: EncodeEngine, nbytes: int) -> Scene:
    """The encode engine has the grant, and its tower has not run."""
    asked = prefill.ask(encode, item(nbytes))
    encode.granted(asked, prefill.ranks)
    return Scene(asked, prefill.placed(asked.rooms[0]))


def between_grant_and_write(prefill: PrefillEngine, encode: EncodeEngine, nbytes: int) -> Scene:
    """The encode engine has the grant and the rows, and is busy with staging them."""
    encode.child.call(sides.hold_staging)
    scene = before_it_is_offered(prefill, encode, nbytes)
    encode.encoded(scene.rows)
    until(lambda: encode.child.call(sides.staging) == 1)
    return scene


def in_the_middle_of_a_write(prefill: PrefillEngine, encode: EncodeEngine, nbytes: int) -> Scene:
    """The encode engine is stopped, and a part of the rows has been written.

    A write that was too fast is no defect: then it is tried with another item.
    """
    [part] = prefill.parts
    for _ in range(_ATTEMPTS):
        scene = before_it_is_offered(prefill, encode, nbytes)
        part.call(sides.blank, scene.place)
        part.begin(sides.stop_writer, scene.place, encode.child.pid)
        encode.child.begin(sides.tower, scene.rows)
        part.end()
        if written_partly(prefill, scene):
            return scene
        encode.child.go_on()
        encode.child.end()
        prefill.loaded(scene.asked)
    raise AssertionError(f"no write of {nbytes} bytes was caught in {_ATTEMPTS} attempts")


def written_partly(prefill: PrefillEngine, scene: Scene) -> bool:
    """Whether some of the rows have been written, and some have not."""
    return 0 < written(prefill, scene) < PROBES


def written(prefill: PrefillEngine, scene: Scene) -> int:
    """How much of the rows has been written, in ``PROBES``."""
    return prefill.parts[0].call(sides.changed, scene.place)


def after_landing(prefill: PrefillEngine, encode: EncodeEngine, nbytes: int) -> Scene:
    """The request may run."""
    asked = prefill.ask(encode, item(nbytes))
    encode.encoded(*asked.items)
    place = prefill.placed(asked.rooms[0])
    prefill.ready(asked)
    return Scene(asked, place)
