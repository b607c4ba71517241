"""Files that are complete or not there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[str]:
    """Gives the name of a file to write beside ``path``, and puts it there once it is complete and on the disk.

    A link stays one: what it points to is written.

    Raises:
        OSError: As :func:`check_target`, or the disk is full.
    """
    target = check_target(path)
    with _about(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        # A short name, as that of the target may be as long as names can be.
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=Path(path).suffix[-16:], dir=target.parent)
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        with _about(path):
            os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_target(path: str | Path) -> Path:
    """The file that a path stands for, links followed, once it is clear that one can be written there.

    Raises:
        OSError: None can; of the class that says why, such as PermissionError or IsADirectoryError.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    with _about(path):
        while not os.path.lexists(folder):  # folders that are missing are made
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "no folder", str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write there", str(folder))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder has this name")
        if os.path.lexists(target) and not target.is_file():
            raise OSError(errno.EINVAL, "no regular file has this name")
    return target


@contextmanager
def _about(path: str | Path) -> Iterator[None]:
    """Names the file that was to be written in the errors of the system, which name others."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return f"{error.strerror}" + (f": {error.filename}" if error.filename and not error.filename2 else "")
