"""The directory of one run: the paths of its files, and the writing of private files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import msgspec

from holdfast.core.ids import MemberId
from holdfast.errors import AuthError, UsageError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.multiprocessing_sockets import remove_sockets_of
from holdfast.runtime.net.stream_sockets import listen
from holdfast.runtime.node.process_info import serves
from holdfast.sealing import Secret
from holdfast.store.backends.durable_files import sync_directory

TOKEN_SIZE_BYTES = 32
TOKEN_DISTINCT_MIN = 8  # one of 10^19 random tokens of 64 hexadecimal digits has fewer different digits
TOKEN_FILE_SIZE_BYTES_MAX = 4096
SHARED_MEMORY = Path("/dev/shm")
PAGES_PREFIX = "holdfast-"
OWNER = "run"  # file beside the status pages: has the path of the run; locked while agent or launcher lives
PAGE = "page-"
ATTEMPT = "attempt-"
ATTEMPT_NAME = re.compile(rf"{ATTEMPT}(\d{{3,}})")
"""Pattern of the names of log directories: one per attempt (start of all workers)."""
SPARE_PAGE = "spare-"
LAST_LINES = 20
MODULES = {
    "agent": "holdfast.runtime.agent.agentd",
    "controller": "holdfast.runtime.controller.controllerd",
    "zygote": "holdfast.runtime.agent.zygote",
}
"""The modules that run as listening processes, by the name of their endpoint."""
TAIL_SIZE_BYTES = 64 * 1024
ROOM_SIZE_BYTES = 64 * 1024  # enough for the first log lines of an agent


class Endpoint(msgspec.Struct, frozen=True):
    """The address at which a process of the run listens, with the pid of the process."""

    host: str
    port: int
    pid: int
    term: int = 0  # the term of a controller
    node: str = ""

    @property
    def at(self) -> Address:
        """Host and port as one address."""
        return Address(self.host, self.port)


def write_private(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace the file ``path`` atomically by a file with ``data`` and mode 0600.

    With ``durable``, the new file is on the disk on return.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def open_log(path: Path) -> int:
    """Return a file descriptor that appends to ``path``, which the caller closes. A new file has mode 0600.

    Raises:
        OSError: the file cannot be written, or is a link, which could lead to any file of this user.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def read_token(path: Path) -> bytes:
    """Return the token (the secret of a run) in file ``path``.

    Raises:
        AuthError: the file is missing, readable by others, or has no token that is long and random enough.
    """
    try:
        with path.open("rb") as file:  # one descriptor, so that the checked file is the one that is read
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(TOKEN_FILE_SIZE_BYTES_MAX + 1)
    except OSError as error:
        raise AuthError(
            f"cannot read the token {path}: {error.strerror}", hint="check the path and its permissions"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise AuthError(
            f"the token {path} can be read by others (mode {stat.S_IMODE(mode):o})", hint=f"chmod 600 {path}"
        )
    if len(token) > TOKEN_FILE_SIZE_BYTES_MAX:
        raise AuthError(
            f"{path} is no token: it has more than {TOKEN_FILE_SIZE_BYTES_MAX} bytes", hint="check the path"
        )
    token = token.strip()
    if len(token) < TOKEN_SIZE_BYTES:
        raise AuthError(
            f"the token {path} has only {len(token)} bytes, {TOKEN_SIZE_BYTES} are needed",
            hint=f"umask 077; openssl rand -hex {TOKEN_SIZE_BYTES} > {path}; copy it to every host",
        )
    if len(set(token)) < TOKEN_DISTINCT_MIN or token in (2 * token)[1:-1]:
        raise AuthError(
            f"the token {path} can be guessed: it repeats itself, or has fewer than {TOKEN_DISTINCT_MIN} "
            "different characters",
            hint=f"umask 077; openssl rand -hex {TOKEN_SIZE_BYTES} > {path}; copy it to every host",
        )
    return token


def try_lock(path: Path) -> int | None:
    """Lock the file ``path``, and return the file descriptor that holds the lock; None if another process holds it.

    The lock is held until the descriptor is closed or this process ends.

    Raises:
        OSError: the file cannot be made or opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_free(lock: Path) -> bool:
    """Return True if no process holds the lock file ``lock``, or if the file does not exist."""
    if not lock.exists():
        return True
    fd = try_lock(lock)
    if fd is not None:
        os.close(fd)
    return fd is not None


class RunDir:
    """The paths of the files in the directory of one run. The constructor touches no file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.journal = self.path / "events.jsonl"
        self.token_file = self.path / "token"
        self.pages_link = self.path / "pages"
        self.checkpoints = self.path / "checkpoints"
        self.ballot = self.path / "ballot.json"
        self.peers = self.path / "peers.json"
        self.agent_lock = self.path / "agent.lock"
        self.launcher_lock = self.path / "launcher.lock"

    def create(self, token: bytes = b"") -> None:
        """Make the run directory (mode 0700), its token file and its private directory for status pages.

        Args:
            token: the secret of the run; if empty, a new random one is made.

        Raises:
            UsageError: the directory already exists, cannot be written, or its path is too long for sockets.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True)
            write_private(self.token_file, token or secrets.token_hex(TOKEN_SIZE_BYTES).encode())
        except FileExistsError as error:
            raise UsageError(
                f"{self.path} exists already, and is no run that can continue",
                hint="choose another --run-id, or another place with --run-dir",
            ) from error
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {self.path}: {error.strerror}",
                hint="choose a writable place with --run-dir",
            ) from error
        try:
            self.pages()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise UsageError(
                f"no room for status pages in {SHARED_MEMORY}: {error.strerror}",
                hint=f"df -h {SHARED_MEMORY}; in a container: --shm-size",
            ) from error
        try:
            listener, at = listen(self.socket_of("probe"))
        except UsageError:
            self.remove_pages()
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        listener.close()
        Path(at.host).unlink()

    def no_room(self) -> str:
        """Return why no file can be written to the run directory now; empty if files can be written."""
        probe = self.path / "room"
        try:
            write_private(probe, bytes(ROOM_SIZE_BYTES))
            probe.unlink()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def hold_launch(self) -> None:
        """Lock the launcher's lock file for the life of this process, which is the launcher.

        Workers, and another start of the run, test this lock.
        """
        try_lock(self.launcher_lock)

    def launcher_is_gone(self) -> bool:
        """Return True if the launcher of this run has ended or was killed, so that it starts no successor of the agent.

        Return False in library mode, which has no launcher.
        """
        return self.launcher_lock.exists() and is_free(self.launcher_lock)

    def secret(self) -> Secret:
        """Return the secret that the processes of this host share. For other hosts use ``RunSettings.secret_of``.

        Raises:
            AuthError: the token is missing, readable by others, or too short.
        """
        return Secret(read_token(self.token_file))

    def pages(self) -> Path:
        """Return the directory of the status pages, and make it on first use.

        It is in shared memory if that is writable, otherwise in the run directory.
        """
        if self.pages_link.is_dir():
            return self.pages_link.resolve()
        if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            target = Path(tempfile.mkdtemp(prefix=PAGES_PREFIX, dir=SHARED_MEMORY))
            try:
                write_private(target / OWNER, os.fsencode(self.path))
            except OSError:
                target.rmdir()
                raise
            self.pages_link.unlink(missing_ok=True)
            self.pages_link.symlink_to(target)
            return target
        self.pages_link.mkdir(mode=0o700)
        return self.pages_link

    def hold_pages(self) -> None:
        """Lock the directory of the status pages for the life of this process.

        Another process can test the lock without access to the run directory.
        """
        with contextlib.suppress(FileNotFoundError):  # the pages are in the run directory
            fd = os.open(self.pages() / OWNER, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)

    def page_path(self, member_id: MemberId) -> Path:
        """Return the path of the status page of a member or a spare.

        The page of a spare is renamed when the spare becomes a member.
        """
        return self.pages() / (f"{PAGE}{member_id}" if member_id >= 0 else f"{SPARE_PAGE}{-member_id}")

    def remove_pages(self) -> None:
        """Remove all status pages and their directory. The agent and its launcher may both do so at the same time.

        If the link in the run directory leads to a directory that this run has not made, only the link is removed.
        """
        with contextlib.suppress(FileNotFoundError):
            if self._made_pages():
                pages = self.pages_link.resolve(strict=True)
                remove_sockets_of(pages)
                empty_out(pages)
        if self.pages_link.is_symlink():
            self.pages_link.unlink(missing_ok=True)

    def _made_pages(self) -> bool:
        """Return True if the pages are in the run directory, or in a directory of shared memory that this run has made.

        Raises:
            FileNotFoundError: there is no directory of status pages.
        """
        if not self.pages_link.is_symlink():
            return self.pages_link.is_dir()
        target = Path(os.readlink(self.pages_link))
        about = target.lstat()
        if target.parent != SHARED_MEMORY or not target.name.startswith(PAGES_PREFIX):
            return False
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return False
        return Path(os.fsdecode((target / OWNER).read_bytes())).samefile(self.path)

    def endpoint_path(self, name: str) -> Path:
        """Return the file with the endpoint of the process ``name``: ``agent``, ``controller`` or ``zygote``."""
        return self.path / f"{name}.json"

    def socket_of(self, name: str) -> Address:
        """Return the Unix socket at which the process ``name`` listens for this host. It is beside the status pages."""
        return Address(str(self.pages() / f"{name}.socket"))

    def write_endpoint(self, name: str, at: Address, term: int = 0, node: str = "") -> None:
        """Publish ``at``, the address at which this process listens, as the endpoint of ``name``."""
        endpoint = Endpoint(*at, os.getpid(), term, node)
        write_private(self.endpoint_path(name), msgspec.json.encode(endpoint))

    def read_endpoint(self, name: str) -> Endpoint | None:
        """Return the endpoint that the process ``name`` has published; None if there is none or its file is damaged."""
        try:
            return msgspec.json.decode(self.endpoint_path(name).read_bytes(), type=Endpoint)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None

    def serving(self, name: str) -> int:
        """Return the pid of the process that listens as ``name``.

        Return 0 if that process is gone, even if its pid was reused.
        """
        endpoint = self.read_endpoint(name)
        return endpoint.pid if endpoint is not None and serves(endpoint.pid, MODULES[name], self.path) else 0

    def remove_endpoint(self, name: str) -> None:
        """Remove the endpoint file ``name`` if this process has written it. A successor's file is kept."""
        endpoint = self.read_endpoint(name)
        if endpoint is not None and endpoint.pid == os.getpid():
            self.endpoint_path(name).unlink(missing_ok=True)


def empty_out(directory: Path) -> None:
    """Remove a directory that contains only files.

    Raises:
        FileNotFoundError: the directory no longer exists.
    """
    for file in directory.iterdir():
        file.unlink(missing_ok=True)
    directory.rmdir()


def probe_path(root: str, job: str, node: str) -> Path:
    """Return the file in ``root`` by which a node shows that it reaches the same ``root`` as the other nodes."""
    return Path(root) / f".holdfast-{job}-{node}"


def attempt_dir(log_dir: Path | str, attempt: int) -> Path:
    """Return the directory of the logs of one attempt (one start of all workers)."""
    return Path(log_dir) / f"{ATTEMPT}{attempt:03d}"


def log_path(log_dir: Path | str, attempt: int, rank: int) -> Path:
    """Return the log file (stdout and stderr) of one rank in one attempt."""
    return attempt_dir(log_dir, attempt) / f"rank-{rank:05d}.log"


def last_lines(path: Path, count: int = LAST_LINES, *, end: int | None = None) -> list[str]:
    """Return the last ``count`` lines of a log, from its last ``TAIL_SIZE_BYTES`` bytes at most; empty without a log.

    Args:
        end: byte offset to stop at (later bytes belong to another process); None reads to the end.
    """
    try:
        with path.open("rb") as file:
            size_bytes = min(file.seek(0, 2), sys.maxsize if end is None else end)
            file.seek(max(0, size_bytes - TAIL_SIZE_BYTES))
            data = file.read(min(TAIL_SIZE_BYTES, size_bytes))
    except FileNotFoundError:
        return []
    return data.decode(errors="replace").splitlines()[-count:]


def error_path(log_dir: Path | str, attempt: int, rank: int) -> Path:
    """Return the error file (in torchelastic's JSON form) of one rank in one attempt."""
    return attempt_dir(log_dir, attempt) / f"rank-{rank:05d}.error.json"


def environment_path(error_file: str) -> Path:
    """Return the file for the environments and versions of a rank's workers, beside the error file ``error_file``."""
    path = Path(error_file)
    return path.with_name(path.name.removesuffix(".error.json") + ".env.jsonl")
