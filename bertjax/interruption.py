"""How programs end: on Ctrl-C, SIGTERM or an error that a user can cause, in one line.

In a tool a signal raises `Interrupted`, which unwinds it as an error does, so that half-written files are removed
(formats/files.py). A training run saves first (process/preemption.py), then calls `leave`.
"""

import atexit
import contextlib
import errno
import lzma
import multiprocessing
import os
import signal
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn

# What a user can cause: settings, files, disks. Anything else is a fault of the program and keeps its traceback.
REFUSALS = (ValueError, OSError, MemoryError, ImportError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
# Tells a launcher that all there was to save is saved, and to start the run again: EX_TEMPFAIL of sysexits.h.
EXIT_PREEMPTED = 75
# Packages whose own classes of errors tell of a network, a bucket or a file.
OUTSIDE = ("aiohttp", "gcsfs", "google", "safetensors", "wandb")
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, then repeat the command"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not read or write it"),
    errno.EISDIR: "name a file in it",
    errno.EROFS: "choose a place that can be written",
}


class Interrupted(SystemExit):
    """A signal came. Ends the process with 130 for SIGINT, 143 for SIGTERM."""


def leave_on_signals() -> None:
    """From now on SIGINT and SIGTERM raise `Interrupted`, unless the process was started to ignore them (nohup).

    For programs only: a library leaves the signals to its caller.
    """
    code = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal code
        if not code:  # not print: the signal may come while the stream is being written to
            os.write(2, f"\ninterrupted by {signal.Signals(number).name}\n".encode())
        code = 128 + number
        if _is_starting(frame):
            leave(code, at_once=True)
        raise Interrupted(code)

    def end() -> None:
        """Skips the end of the interpreter, which may crash while devices still compute."""
        if code:
            leave(code, at_once=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    sys.unraisablehook = _raise_again
    atexit.register(end)


def _raise_again(ignored: Any) -> None:
    """Destructors and callbacks of the garbage collector swallow what is raised in them."""
    if isinstance(ignored.exc_value, Interrupted | KeyboardInterrupt):
        main, number = threading.main_thread().ident, getattr(ignored.exc_value, "code", 130) - 128
        threading.Timer(0.05, signal.pthread_kill, (main, number)).start()
    else:
        sys.__unraisablehook__(ignored)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In this block no KeyboardInterrupt is swallowed, see `_raise_again`."""
    before, sys.unraisablehook = sys.unraisablehook, _raise_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def leave_without_saving() -> None:
    """From now on SIGINT and SIGTERM end the process with EXIT_PREEMPTED, at once; a SIGINT that is ignored (nohup) is.

    For the parts of a run outside `stop_on_signals` (process/preemption.py), where nothing is to be saved. A thread
    acts, since Python runs handlers only once the main thread is back from the compiler or the restore, and what they
    raise is lost in jax's callback of the garbage collector. Of several processes, jax's pre-emption service takes
    SIGTERM from when they have joined.
    """

    def handler(number: int, frame: object) -> None:
        """Only a signal that has a handler is written to the pipe."""

    def listen() -> None:
        while data := os.read(reader, 1):
            if (number := data[0]) in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is handler:
                name = signal.Signals(number).name
                text = f"stopped by {name} while no step was running, so there is nothing to save; start again to go on"
                os.write(2, f"bertjax: {text}\n".encode())
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(EXIT_PREEMPTED)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()


def hush_closed_loops() -> None:
    """On a full disk each write of a checkpoint that is still under way tells an event loop that has ended: hundreds of
    tracebacks before the line that says what happened."""
    tell = sys.unraisablehook
    sys.unraisablehook = lambda ignored: str(ignored.exc_value) == "Event loop is closed" or tell(ignored)


def _is_starting(frame: Any) -> bool:
    """Whether the program is still importing and none of its functions runs yet, so nothing is half-written.

    An exception during the import of a compiled module would come out as another one.
    """
    importing = False
    while frame is not None:
        importing |= frame.f_code.co_filename.startswith("<frozen importlib")
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name != "<module>":
            return False
        frame = frame.f_back
    return importing


def leave_signals_to_parent() -> None:
    """For a worker process: it ignores signals, and ends with its parent.

    SLURM, a terminal and launch/host.sh signal all processes of a run, but a run that saves first still needs its
    workers for the step that runs.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """From now on this process ends when its parent does, also when that is killed."""

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, name="follow parent", daemon=True).start()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process without an exception: for imports, see `_is_starting`. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def refusals(name: str, code: int = 1, *more: type[BaseException]) -> Iterator[None]:
    """What a user can cause ends the program with one line, `name: ...`, and this exit code.

    Where the reader of the output has left (`| head`), or it is closed (`>&-`), the program ends in silence, with the
    shell's code of SIGPIPE.

    Args:
      more: classes of errors that are meant too.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a name of a file need not be UTF-8
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        text = one_line(error, more)
        if text is None:
            raise
        drop_unwritable_output()
        refuse(name, text, code, error)


def refuse(name: str, text: str, code: int, cause: BaseException | None = None) -> NoReturn:
    """Ends the program with the line `name: text` and this exit code."""
    ended = SystemExit(f"{name}: {text}")
    if code != 1:  # the interpreter prints the message of the others
        print(ended, file=sys.stderr)
        ended.code = code
    raise ended from cause


def one_line(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> str | None:
    """What an error that a user can cause says, in one line; None for a fault of the program."""
    text = " ".join(map(str.strip, str(error).splitlines()))
    if type(error).__module__.partition(".")[0] in OUTSIDE:
        return f"{type(error).__name__}: {text}"
    if text.startswith("Unable to initialize backend") or _found_no_device(error):
        asked = os.environ.get("JAX_PLATFORMS", "")
        return (
            f"jax finds no device for JAX_PLATFORMS={asked}: unset it to use those that are there, or install what it "
            f"needs, pip install 'bertjax[cuda]' or 'bertjax[tpu]'{'. It says: ' * bool(text)}{text[:300]}"
        )
    if text.startswith("Could not determine home directory"):  # RuntimeError of pathlib, in a container for example
        return "this user has no home directory, where caches go: set HOME to a directory that can be written"
    if text.startswith("RESOURCE_EXHAUSTED"):  # XlaRuntimeError
        return (
            "the device is out of memory: take fewer rows at once, in a run by --config.accumulation=2, in a tool by a "
            f"smaller --batch_size (docs/pretraining.md, 'Out of memory'). XLA says: {text[:300]}"
        )
    if not isinstance(error, (*REFUSALS, *more)):
        return None
    if isinstance(error, OSError) and error.strerror:
        files = (error.filename, error.filename2)
        names = [os.fsdecode(file) for file in files if isinstance(file, str | bytes | os.PathLike)]
        remedy = REMEDIES.get(error.errno)
        if names and error.errno in (errno.EEXIST, errno.ENOTDIR):
            remedy = f"{_in_the_way(names[0])}: choose another place"
        return ": ".join([*names[:1], error.strerror]) + (f"; {remedy}" if remedy else "")
    if isinstance(error, ImportError) and error.name:
        return None if error.name.startswith("bertjax") else f"{text}; pip install {error.name.partition('.')[0]}"
    if isinstance(error, MemoryError):
        return f"not enough memory{': ' * bool(text)}{text}"
    return text or type(error).__name__


def _in_the_way(path: str) -> str:
    """'it is a file', or of the innermost part of the path that is there, 'NAME is a file'."""
    there = path
    while not os.path.lexists(there) and os.path.dirname(there):
        there = os.path.dirname(there)
    kind = "a directory" if os.path.isdir(there) else "a file" if os.path.exists(there) else "a link to nothing"
    return f"{'it' if there == path else there} is {kind}"


def _found_no_device(error: BaseException) -> bool:
    """Whether it is the assertion by which jax 0.10 says that the platform that it was asked for is not there.

    jax takes its own frames out of tracebacks, so it is asked again.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    if not isinstance(error, AssertionError) or str(error) or not bridge or bridge.backends_are_initialized():
        return False
    try:
        return not bridge.get_backend()
    except (AssertionError, RuntimeError):
        return True


def _open_closed_streams() -> None:
    """Gives a closed standard output a pipe without a reader, and a closed stderr /dev/null.

    For Python they are None. The next files that it opens would have their numbers, 1 and 2, which libraries write to.
    """
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.dup2(writer, reader)  # the number of the reader, the lowest that was free, becomes a writer too
        sys.stdout = open(reader, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def drop_unwritable_output() -> None:
    """Discards standard output from now on, if it cannot be written: each print would fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int, at_once: bool = False) -> NoReturn:
    """Ends the process with this exit code without waiting for threads that still compile.

    A machine that is pre-empted gives half a minute, a compilation may take several.
    """
    if at_once or any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        for child in multiprocessing.active_children():  # data workers
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
