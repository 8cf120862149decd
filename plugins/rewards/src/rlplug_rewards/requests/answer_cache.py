"""Cache of a server's answers in one SQLite file, which any number of ranks and runs may share."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any, Final

from rlplug.errors import ConfigError, describe

VERSION: Final = 1
"""Of the table: a file of another version is refused."""
BUSY_S: Final = 10.0
"""Longest wait for another process that writes, in seconds."""
BETWEEN_TRIES_S: Final = 0.01
EVICTED_SHARE: Final = 4
"""A full cache loses one answer of this many, the oldest."""


def cache_key(url: str, payload: dict[str, Any]) -> bytes:
    """Return the SHA-256 of a request: its address, and its body with model, messages and sampling."""
    text = json.dumps([VERSION, url, payload], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


class AnswerCache:
    """Answers by :func:`cache_key`. Methods may be called from any thread.

    Each answer is written in a transaction. The file never grows above ``max_mib``: when it is full, its oldest answers
    go. It must be on a local disk, since SQLite's write-ahead log needs shared memory (sqlite.org/wal.html).

    Args:
        path: The file; its folder must exist.
        max_mib: Largest size of the file in MiB; the write-ahead log beside it takes some more.
        key: The configuration key of the path, for messages.
    """

    def __init__(self, path: str, max_mib: int, key: str) -> None:
        if max_mib < 1:
            raise ConfigError(f"{key}'s cache_mib is {max_mib}: give at least 1.")
        self.path, self._max_mib, self._key = path, max_mib, key
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0

    def open(self) -> None:
        """Open the file, or make it.

        Raises:
            ConfigError: It cannot be opened, or is no cache.
        """
        try:
            with self._lock:
                self._connected()
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(
                f"{self._key} is {self.path!r}, which cannot be used ({describe(problem)}): name a file in a folder "
                "that exists and may be written, on a local disk; delete one that is damaged."
            ) from problem

    def get(self, key: bytes) -> str | None:
        """Return the answer to a request, or ``None``.

        Raises:
            sqlite3.Error: The file is damaged or cannot be read.
        """
        with self._lock, closing(self._connected().execute("SELECT answer FROM answers WHERE key = ?", (key,))) as rows:
            found = rows.fetchone()
        return None if found is None else str(found[0])

    def put(self, key: bytes, answer: str) -> None:
        """Keep an answer, in place of an earlier one to the same request.

        Raises:
            sqlite3.Error: It could not be written; the file is as it was.
        """
        with self._lock:
            connection = self._connected()
            try:
                self._insert(connection, key, answer)
            except sqlite3.OperationalError as problem:
                if problem.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                with connection:
                    connection.execute(
                        "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY rowid "
                        "LIMIT 1 + (SELECT count(*) FROM answers) / ?)",
                        (EVICTED_SHARE,),
                    )
                self._insert(connection, key, answer)

    @staticmethod
    def _insert(connection: sqlite3.Connection, key: bytes, answer: str) -> None:
        with connection:
            connection.execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", (key, answer))

    def _connected(self) -> sqlite3.Connection:
        """Return this process's connection: one that was open before a fork may not be used after it."""
        if self._connection is None or self._process != os.getpid():
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # answers repeat what prompts say
            self._connection, self._process = _open(self.path, self._max_mib), os.getpid()
        return self._connection


def _open(path: str, max_mib: int) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version != VERSION and (version or tables):
                raise sqlite3.DatabaseError("it is another kind of database, or of another version")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(rowid INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE NOT NULL, answer TEXT NOT NULL)"
            )
            connection.execute(f"PRAGMA user_version = {VERSION}")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, (max_mib << 20) // page_bytes)}")
    except BaseException:
        connection.close()
        raise
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; SQLite itself does not wait for others that do the same to a new file."""
    ends = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as problem:
            if problem.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
        time.sleep(BETWEEN_TRIES_S)
