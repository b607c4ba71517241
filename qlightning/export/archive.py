"""Reading zip archives of others: nothing of them is trusted before it is checked."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from qlightning.errors import ArtifactError

MAX_MEMBERS = 100_000
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")


class Archive:
    """An open zip archive whose members are stored as they are, under plain relative names, no name twice.

    Args:
        path: The file.

    Raises:
        ArtifactError: It is no such archive, or damaged.
        FileNotFoundError: There is no file.
    """

    def __init__(self, path: str | Path) -> None:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such file.")
        self.path = path
        with self._errors():
            self._zip = zipfile.ZipFile(path)
        try:
            self._members = self._checked()
        except BaseException:
            self._zip.close()
            raise

    def names(self) -> list[str]:
        """The names of the members, below the one folder at the top."""
        return list(self._members)

    def read(self, name: str, size: int | None = None) -> bytes:
        """The contents of a member, whose checksum is checked.

        Args:
            name: Below the top folder.
            size: How many bytes it has to have; None: any.

        Raises:
            ArtifactError: It is not there, of another size or damaged.
        """
        info = self._members.get(name)
        if info is None:
            pickled = "data.pkl" in self._members
            raise ArtifactError(
                f"{self.path}: there is no {name!r} in it; "
                + (
                    "it is a file of torch.save, such as a checkpoint. Build the model of it (load_from_checkpoint, "
                    "load_state_dict) and convert that, or use the command line: qlightning export."
                    if pickled
                    else "it is of another kind, or incomplete."
                )
            )
        if size is not None and info.file_size != size:
            raise ArtifactError(f"{self.path}: {name!r} has {info.file_size} bytes, {size} are expected.")
        with self._errors():
            return self._zip.read(info)

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._zip.infolist()
        available = os.path.getsize(self.path)
        members: dict[str, zipfile.ZipInfo] = {}
        tops = {info.filename.partition("/")[0] for info in infos}
        if len(infos) > MAX_MEMBERS or len(tops) != 1:
            raise ArtifactError(f"{self.path}: {len(infos)} members in {len(tops)} folders; one folder is expected.")
        for info in infos:
            name = info.filename.partition("/")[2]
            parts = name.split("/")
            if not _NAME.fullmatch(name) or ".." in parts or "." in parts:
                raise ArtifactError(
                    f"{self.path}: a member has the name {info.filename[:100]!r}, which is no plain one."
                )
            if name in members:
                raise ArtifactError(f"{self.path}: {name!r} is in it twice.")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
                raise ArtifactError(f"{self.path}: {name!r} is compressed or encrypted; torch stores members plainly.")
            members[name] = info
        if sum(info.file_size for info in members.values()) > available:
            raise ArtifactError(f"{self.path}: its members claim more than the {available} bytes that the file has.")
        return members

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ArtifactError:
            raise
        except Exception as error:  # zipfile raises what damaged numbers and texts lead to
            raise ArtifactError(f"{self.path} is no whole archive: {type(error).__name__}: {error}.") from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
