# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos to send: found in installed packages, drawn, or random, as data URLs.

Owns making and encoding them. Imports Pillow, numpy and OpenCV when they are needed.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
import mimetypes
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

_SHIPPED = (
    ("sklearn", "datasets/images/china.jpg"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("vllm", "distributed/kv_transfer/disagg_prefill_workflow.jpg"),
)


def find_picture() -> Path | None:
    """A picture file of an installed package, or None. Imports none of those packages."""
    for package, relative in _SHIPPED:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec is not None else []:
            path = Path(root) / relative
            if path.is_file():
                return path
    return None


def default_picture() -> tuple[str, str]:
    """(where it comes from, data URL) of a picture: a shipped one, else a drawn one."""
    path = find_picture()
    if path is None:
        return "a drawn landscape", png_url(draw_landscape(480, 320))
    return str(path), file_url(path)


def file_url(path: Path) -> str:
    """The data URL of a file, its type guessed from its name.

    Raises OSError if it cannot be read, ValueError if its name is not that of a picture or video.
    """
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith(("image/", "video/")):
        raise ValueError(
            f"{path}: the name does not end like that of an image or video (.jpg, .png, .mp4)"
        )
    return data_url(path.read_bytes(), kind)


def data_url(content: bytes, kind: str) -> str:
    """`content` of media type `kind` as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_url(picture: Image.Image) -> str:
    """A Pillow image as the data URL of a PNG, which keeps every pixel."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return data_url(buffer.getvalue(), "image/png")


def noise_like(url: str, seed: int, longest: int = 1024) -> str:
    """Random pixels in the proportions of the picture in `url`, at most `longest` pixels a side.

    Raises OSError if `url` holds no picture that Pillow can read.
    """
    from PIL import Image

    content = base64.b64decode(url.partition(",")[2])
    with Image.open(io.BytesIO(content)) as picture:
        width, height = picture.size
    scale = min(1.0, longest / max(width, height))
    return random_picture(max(32, round(width * scale)), max(32, round(height * scale)), seed)


def draw_landscape(width: int, height: int) -> Image.Image:
    """Sky, sun, hills and a house, `width` x `height` pixels."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    for y in range(height):
        light = y / height
        draw.line([(0, y), (width, y)], fill=(int(90 + 120 * light), int(150 + 80 * light), 235))
    sun = (0.7 * width, 0.12 * height, 0.7 * width + 0.18 * height, 0.3 * height)
    draw.ellipse(sun, fill=(255, 226, 120))
    for number, colour in enumerate([(96, 132, 96), (70, 112, 70), (48, 92, 52)]):
        level = height * (0.55 + 0.14 * number)
        ridge = [
            (x, int(level + 0.06 * height * math.sin(x / width * 7 + 2 * number)))
            for x in range(width + 1)
        ]
        draw.polygon([*ridge, (width, height), (0, height)], fill=colour)
    left, top, side = 0.2 * width, 0.66 * height, 0.16 * height
    draw.rectangle((left, top, left + side, top + side), fill=(168, 88, 66))
    draw.polygon(
        [(left - 8, top), (left + side / 2, top - side * 0.7), (left + side + 8, top)],
        fill=(104, 50, 44),
    )
    return picture


def random_picture(width: int, height: int, seed: int) -> str:
    """Data URL of random pixels, `width` x `height`; the same for the same seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png_url(Image.fromarray(pixels))


def random_video(width: int, height: int, frames: int, seed: int) -> str:
    """Data URL of a short AVI of random frames at 4 a second; the same for the same seed."""
    import cv2
    import numpy as np

    generator = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clip.avi"
        code = cv2.VideoWriter.fourcc(*"MJPG")
        writer = cv2.VideoWriter(str(path), code, 4.0, (width, height))
        if not writer.isOpened():
            raise OSError("OpenCV cannot write Motion JPEG in AVI here")
        for _ in range(frames):
            writer.write(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        writer.release()
        return data_url(path.read_bytes(), "video/x-msvideo")
