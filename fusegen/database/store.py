"""The user's database: one SQLite file, shared by any number of processes.

    FUSEGEN_DATABASE      another file than `tuned-1.db` in fusegen's folder of the user's data

SQLite's rollback journal is used, not its write-ahead log: that one keeps an index in shared memory, which the
processes of two machines on a network file system do not have in common. Writers take turns by SQLite's own locks; each
change is one transaction, so a process that is killed leaves the state before or after it. Reading never creates a
file. What is read is checked row by row; a row that can't have been measured is passed over, and said in the log.

A file that is damaged, or that is no tuning database of this format, is never written to: whoever writes next moves it
aside with a warning, under its name with `.damaged-1` behind it, and starts a new one. Only the user's own database is
treated so; a file that a caller names is refused and left where it is. The format's number is part of the file's
default name, so that two versions of fusegen with different formats leave each other's files alone.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

import platformdirs

from fusegen.database.keys import Problem, Tools
from fusegen.database.rows import FIELDS, KEY, Measurement, Unsound, better, contradict, current
from fusegen.errors import FusegenError, MissingError, OutputError, RequestError

log = logging.getLogger("fusegen.database")

FILE_VARIABLE = "FUSEGEN_DATABASE"
FORMAT = 1
APPLICATION = int.from_bytes(b"fgtn", "big")  # in the file's header: whose it is
PATIENCE_S = 30.0  # how long one process waits for another's transaction
SIDECARS = ("-journal", "-wal", "-shm")  # of a file that is moved aside: a stray journal would be applied to the next
NOT_OURS = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
Result = TypeVar("Result")


class Unreadable(RequestError):
    """A file that is damaged or no tuning database of this format."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of taking rows in. A conflict is a pair of rows, the one that was kept first, and how they differ."""

    added: int = 0
    replaced: int = 0
    kept: int = 0  # the database's own rows that were better
    same: int = 0
    conflicts: tuple[tuple[Measurement, Measurement, str], ...] = ()


def default_path() -> Path:
    """The file that FUSEGEN_DATABASE names, else the user's own: among data, not caches, since it is costly to make."""
    named = os.environ.get(FILE_VARIABLE)
    folder = Path(platformdirs.user_data_dir("fusegen", appauthor=False))
    return Path(named) if named else folder / f"tuned-{FORMAT}.db"


class Database:
    """Rows by their keys, in the user's own file or the one at `path`.

    Methods raise Unreadable for a file that is none of ours, OutputError for one that the system does not let us write,
    and MissingError for one that it does not let us read, or that others keep busy.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.own = path is None
        self.path = default_path() if path is None else path

    # ---------------------------------------------------------------- reading

    def rows(self, graph: str | None = None) -> list[Measurement]:
        """Every row, or those of one graph; none where there is no file."""
        if not self.path.exists():
            return []
        where, values = ("", ()) if graph is None else (" WHERE graph = ?", (graph,))
        query = f"SELECT {', '.join(FIELDS)} FROM measurements{where} ORDER BY {', '.join(KEY)}"

        def read() -> list[Measurement]:
            with closing(self.connect()) as connection:
                if not checked(connection, self.path):
                    return []
                return list(self.sound(connection.execute(query, values)))

        return self.guarded(read)

    def need(self) -> list[Measurement]:
        """Every row. Raises RequestError where there is no file."""
        if not self.path.is_file():
            raise RequestError(f"there is no database at {self.path}; name a file that `fusegen tune` wrote")
        return self.rows()

    def sound(self, found: Iterable[Sequence[object]]) -> Iterator[Measurement]:
        for values in found:
            try:
                yield Measurement.of(dict(zip(FIELDS, values, strict=True)))
            except Unsound as error:
                log.warning("%s: a row is passed over: %s", self.path, error)

    # ---------------------------------------------------------------- writing

    def record(self, rows: Iterable[Measurement]) -> None:
        """Keep rows, each in place of what has its key."""
        wanted = tuple(rows)
        self.write(lambda connection: insert(connection, wanted))

    def replace(self, problem: Problem, tools: Tools, rows: Iterable[Measurement]) -> None:
        """Keep `rows` as all that is known of a problem with these tools: what was measured together stays together."""
        kept = tuple(rows)
        wanted = dict(zip(KEY, (*values_of(problem), "", *values_of(tools)), strict=True))
        del wanted["configuration"]
        condition = " AND ".join(f"{name} = ?" for name in wanted)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(f"DELETE FROM measurements WHERE {condition}", tuple(wanted.values()))
            insert(connection, kept)

        self.write(change)

    def merge(self, rows: Iterable[Measurement]) -> Merged:
        """Take rows in by the rule of `better`, all or none."""
        wanted = tuple(rows)
        query = f"SELECT {', '.join(FIELDS)} FROM measurements WHERE {' AND '.join(f'{k} = ?' for k in KEY)}"

        def change(connection: sqlite3.Connection) -> Merged:
            counts = {"added": 0, "replaced": 0, "kept": 0, "same": 0}
            conflicts = []
            for row in wanted:
                own = next(self.sound(connection.execute(query, row.values[: len(KEY)])), None)
                if own == row:
                    counts["same"] += 1
                    continue
                chosen = row if own is None else better(own, row)
                counts["added" if own is None else "replaced" if chosen is row else "kept"] += 1
                if own is not None:
                    dropped = own if chosen is row else row
                    if why := contradict(chosen, dropped):
                        conflicts.append((chosen, dropped, why))
                insert(connection, [chosen])
            return Merged(**counts, conflicts=tuple(conflicts))

        return self.write(change)

    # ---------------------------------------------------------------- the file

    def connect(self, create: bool = False) -> sqlite3.Connection:
        """Open the file; reading may have to undo what a killed writer began, so it is not opened read-only."""
        mode = "rwc" if create else "rw"
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode={mode}"
        return sqlite3.connect(uri, timeout=PATIENCE_S, isolation_level=None, uri=True)

    def write(self, change: Callable[[sqlite3.Connection], Result]) -> Result:
        """One transaction on a file that is ours, made where there is none. A `change` may run twice."""

        def attempt() -> Result:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self.connect(create=True)) as connection:  # closing undoes what was not committed
                connection.execute("BEGIN IMMEDIATE")  # the lock is taken now: none is upgraded in the middle
                if not whole(connection, self.path):
                    create_tables(connection)
                respell(connection)
                result = change(connection)
                connection.execute("COMMIT")
                return result

        def twice() -> Result:
            """Once more where another process has moved a damaged file aside meanwhile: SQLite says so, or that the
            disk is at fault. One that is says so again."""
            try:
                return attempt()
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode
                if code & 0xFF != sqlite3.SQLITE_IOERR and code != sqlite3.SQLITE_READONLY_DBMOVED:
                    raise
            return attempt()

        try:
            return self.guarded(twice, "written")
        except Unreadable as error:
            if not self.own:
                raise Unreadable(f"{error}\n  it is left as it is; name another file") from error
            found = error
        self.guarded(lambda: self.set_aside(found), "written")
        return self.guarded(twice, "written")

    def set_aside(self, error: Unreadable) -> None:
        """Move what can't be used out of the way, unless another process has just done so."""
        from filelock import FileLock

        with FileLock(f"{self.path}.lock"):
            try:
                self.guarded(self.examine)
                return
            except Unreadable:
                pass
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
                number += 1
            for ending in (*SIDECARS, ""):  # the file last: what then lies beside its name is a new database's journal
                part = Path(f"{self.path}{ending}")
                if part.exists():
                    part.rename(f"{aside}{ending}")
        log.warning("%s\n  it is now %s, and a new database is begun", error, aside)

    def examine(self) -> None:
        with closing(self.connect(create=True)) as connection:
            whole(connection, self.path)

    def guarded(self, action: Callable[[], Result], used: Literal["read", "written"] = "read") -> Result:
        """What `action` gives; what SQLite or the system says against it, as an error of ours."""
        try:
            return action()
        except (sqlite3.Error, OSError) as error:
            raise self.meaning(error, used) from error

    def meaning(self, error: sqlite3.Error | OSError, used: str) -> FusegenError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in NOT_OURS:
            return Unreadable(f"{self.path} is damaged: {error}")
        if code == sqlite3.SQLITE_BUSY:
            kept = f"another process has kept it busy for {PATIENCE_S:.0f} s"
            return MissingError(f"{self.path} can't be {used}: {error}; {kept}")
        kind = OutputError if used == "written" else MissingError
        return kind(f"{self.path} can't be {used}: {getattr(error, 'strerror', None) or error}")


def values_of(part: Problem | Tools) -> tuple[object, ...]:
    return tuple(getattr(part, name) for name in part.__dataclass_fields__)


def checked(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables are there; False for an empty file. Raises Unreadable for another's."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not tables and not application:
        return False
    if application != APPLICATION:
        raise Unreadable(f"{path} is a database of something else than fusegen's tuning")
    if version != FORMAT:
        raise Unreadable(f"{path} is a tuning database of format {version}, and this version reads {FORMAT}")
    return True


def whole(connection: sqlite3.Connection, path: Path) -> bool:
    """As `checked`, and every page is looked at: a write must not go beside damage that only reading would meet."""
    there = checked(connection, path)
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise Unreadable(f"{path} is damaged: {verdict}")
    return there


def create_tables(connection: sqlite3.Connection) -> None:
    """Without types: SQLite would change values to fit them, and every value is checked when it is read."""
    connection.execute(f"CREATE TABLE measurements ({', '.join(FIELDS)}, PRIMARY KEY ({', '.join(KEY)})) WITHOUT ROWID")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")


def respell(connection: sqlite3.Connection) -> None:
    """Rows of earlier versions get today's configurations; one that was measured again under its new name goes."""
    connection.create_function("current", 1, lambda text: current(text) if isinstance(text, str) else text)
    old = "WHERE configuration != current(configuration)"
    connection.execute(f"UPDATE OR IGNORE measurements SET configuration = current(configuration) {old}")
    connection.execute(f"DELETE FROM measurements {old}")


def insert(connection: sqlite3.Connection, rows: Iterable[Measurement]) -> None:
    places = ", ".join("?" * len(FIELDS))
    connection.executemany(f"INSERT OR REPLACE INTO measurements VALUES ({places})", [row.values for row in rows])
