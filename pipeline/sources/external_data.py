"""External data of the ONNX files of users: tensors' bytes in other files, which must lie in the model's folder."""

from collections.abc import Sequence
from pathlib import Path

import onnx

from builders.onnx_graphs.weights import bytes_of, embed, is_external, place_of, set_place, wrong_length
from enginesmith.core.errors import ModelError
from pipeline.sources.walk import all_tensors

# The greatest size that protobuf can hold, in bytes.
LARGEST_BYTES = (1 << 31) - 1
# An external tensor with its file, and offset and length in that, in bytes.
External = tuple[onnx.TensorProto, Path, int, int]


def inside(path: Path, folder: Path, what: str) -> Path:
    """The path, if it is a file in `folder` with links followed; else ModelError. what: names the folder."""
    try:
        within, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, links in a circle
        raise ModelError(f"{str(path)[:300]!r} cannot be the path of a file ({error}); correct it") from error
    if not within:
        raise ModelError(f"{path} leads outside {what} {folder}; put the file itself inside")
    if not there:
        raise ModelError(f"{path} does not exist or is not a file; correct the path or restore the file")
    return path


def list_external(model: onnx.ModelProto, path: Path) -> list[External]:
    """Each external tensor of the model in `path`, with file, offset and length in bytes; no file is read.

    Raises ModelError for a file outside of the model's folder, and one that is too short.
    """
    found = []
    for tensor in all_tensors(model):
        if is_external(tensor):
            name, offset, length = place_of(tensor)
            file = path.parent / name
            what = f"the folder of {path.name}, which its external data must stay in:"
            size = inside(file, path.parent, what).stat().st_size
            if offset + length > size:
                raise ModelError(
                    f"{path}: tensor {tensor.name[:80]!r} ends at byte {offset + length} of {file.name}, which has "
                    f"{size}; the file is truncated or belongs to another model: copy both again"
                )
            found.append((tensor, file, offset, length))
    return found


def embed_all(tensors: Sequence[External], path: Path) -> None:
    """Read the bytes of external tensors into them, in place. Raises ModelError over 2 GB."""
    if sum(length for *_, length in tensors) > LARGEST_BYTES:
        raise ModelError(f"{path}: graphs inside nodes have constants of over 2 GB; make initializers of them")
    for tensor, file, offset, length in tensors:
        set_place(tensor, str(file), offset, length)
        embed(tensor)


def check_places(external: Sequence[External], path: Path) -> None:
    """Raise ModelError where tensors overlap, so that their shards would be larger than the files, or where a tensor's
    bytes are not as many as its shape says."""
    places = {(file.resolve(), offset, length) for _, file, offset, length in external}
    held = sum(file.stat().st_size for file in {file for file, *_ in places})
    if sum(length for *_, length in places) > held:
        raise ModelError(f"{path}: tensors overlap in its external data files ({held} bytes); export it again")
    for tensor, _, _, length in external:
        if length != bytes_of(tensor):
            raise ModelError(f"{path}: {wrong_length(tensor)}")
