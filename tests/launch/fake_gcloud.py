"""A gcloud for the tests: records every call, refuses what the real one would not parse, and plays
one slice with the failures that a test has scripted.

Runs as a program (see conftest.py). State is in the directory $FAKE_GCLOUD:
  calls   one list of words a line, as Python writes it
  plays   {verb: [reply, ...]}, marshalled; the first reply of a verb answers its next call. A reply
          has rc, stdout, stderr, and `slice`, the slice's state from then on ("" = gone)
  slice   gcloud's word for the slice's state; absent = there is none
  hosts/  if there: home directories in which ssh really runs its command, and scp copies
Verbs are the last two words of the command, such as "tpu-vm create"; ssh is told apart by what it
runs: "ssh true", "ssh status", "ssh start", "ssh setup", "ssh unpack", "ssh stop", "ssh log",
"ssh complaint".

A test makes dozens of calls, each a new process: hence the few imports, and some only where needed.
"""

import marshal
import os
import sys

# Flags by verb, read off `gcloud compute tpus ... --help` of Google Cloud SDK 528.0.0.
WIDE = {"--project", "--format", "--quiet", "--zone"}
CREATE = {
    "--spot",
    "--reserved",
    "--network",
    "--subnetwork",
    "--service-account",
    "--metadata",
    "--internal-ips",
    "--labels",
    "--accelerator-type",
}
CONNECT = {"--worker", "--internal-ip", "--ssh-key-file", "--strict-host-key-checking"}
FLAGS = {
    "tpu-vm create": CREATE | {"--version", "--preemptible"},
    "tpu-vm describe": set(),
    "tpu-vm delete": {"--async"},
    "tpu-vm ssh": CONNECT | {"--command", "--ssh-flag", "--output-directory"},
    "tpu-vm scp": CONNECT | {"--recurse", "--compress", "--scp-flag"},
    "queued-resources create": CREATE
    | {
        "--runtime-version",
        "--node-id",
        "--node-count",
        "--node-prefix",
        "--guaranteed",
        "--valid-until-duration",
        "--valid-after-duration",
    },
    "queued-resources describe": set(),
    "queued-resources delete": {"--async", "--force"},
    "queued-resources ssh": CONNECT | {"--command", "--ssh-flag", "--node", "--batch-size"},
    "queued-resources scp": CONNECT | {"--recurse", "--compress", "--scp-flag", "--node"},
}


def main(words: list[str]) -> int:
    os.chdir(os.environ["FAKE_GCLOUD"])
    with open("calls", "a") as calls:
        calls.write(repr(words) + "\n")

    verb = " ".join(words[2:4])
    problem = parse_error(words, verb)
    if problem:
        print(f"ERROR: (gcloud) {problem}", file=sys.stderr)
        return 2

    command = next((word.removeprefix("--command=") for word in words if word.startswith("--command=")), None)
    reply = next_reply(verb, kind_of_ssh(command) if verb.endswith("ssh") else verb)
    if reply is None:
        reply = default_reply(verb, words, command)
    set_slice(reply.get("slice"))
    sys.stdout.write(reply.get("stdout", ""))
    sys.stderr.write(reply.get("stderr", ""))
    return reply.get("rc", 0)


def parse_error(words: list[str], verb: str) -> str:
    if words[:2] != ["compute", "tpus"] or verb not in FLAGS:
        return f"Invalid choice: {' '.join(words[:4])}"
    flags = [word.split("=", 1)[0] for word in words[4:] if word.startswith("--")]
    unknown = set(flags) - FLAGS[verb] - WIDE
    if unknown:
        return f"unrecognized arguments: {' '.join(sorted(unknown))}"
    needed = {"create": "--accelerator-type", "scp": "--worker"}.get(verb.split()[1], "--zone")
    if needed not in flags or "--zone" not in flags:
        return f"argument {needed}: Must be specified."
    if verb == "queued-resources create" and ("--node-id" in flags) == ("--node-count" in flags):
        return "Exactly one of (--node-id | --node-count) must be specified."
    if {"--spot", "--reserved"} <= set(flags):
        return "argument --spot: not allowed with argument --reserved"
    return ""


def kind_of_ssh(command: str | None) -> str:
    if command is None:
        return "ssh shell"
    if "tar -xzf" in command:
        return "ssh unpack"
    words = command.split()
    return f"ssh {words[2] if 'host.sh' in command else words[0]}"


def next_reply(*verbs: str) -> dict | None:
    if not os.path.exists("plays"):
        return None
    with open("plays", "rb") as file:
        plays = marshal.load(file)
    for verb in verbs:
        if plays.get(verb):
            reply = plays[verb].pop(0)
            with open("plays", "wb") as file:
                marshal.dump(plays, file)
            return reply
    return None


def set_slice(state: str | None) -> None:
    if state is None:
        return
    forget("slice")
    if state:
        with open("slice", "w") as file:
            file.write(state)
    if state in ("", "PREEMPTED", "SUSPENDED"):  # the disks go with the slice
        forget("setup")
        forget("started")
        if os.path.exists("hosts"):
            import shutil

            for name in os.listdir("hosts"):
                shutil.rmtree(f"hosts/{name}")
                os.mkdir(f"hosts/{name}")


def forget(name: str) -> None:
    if os.path.exists(name):
        os.remove(name)


def default_reply(verb: str, words: list[str], command: str | None) -> dict:
    group, action = verb.split()
    if action == "create":
        return {"slice": "ACTIVE" if group == "queued-resources" else "READY"}
    if not os.path.exists("slice"):
        return {
            "rc": 1,
            "stderr": f"ERROR: ({'.'.join(words[:4])}) NOT_FOUND: Resource "
            f"'projects/p/locations/z/nodes/{words[4]}' was not found\n",
        }
    if action == "delete":
        return {"slice": ""}
    if action == "describe":
        with open("slice") as file:
            state = file.read()
        if "--format=value(name)" not in words:
            return {"stdout": state + "\n"}
        if state in ("ACTIVE", "SUSPENDED", "WAITING_FOR_RESOURCES"):
            return {"stdout": words[4] + "\n"}
        return {"rc": 1, "stderr": "ERROR: NOT_FOUND: Resource was not found\n"}
    if action == "scp":
        import shutil

        shutil.copy(words[4], "copied.tar.gz")
        for name in os.listdir("hosts") if os.path.exists("hosts") else ():
            shutil.copy(words[4], f"hosts/{name}/{words[5].split(':', 1)[1]}")
        return {}
    if os.path.exists("hosts"):
        return run_on_hosts(command or "true")
    return imagined_host(kind_of_ssh(command))


def run_on_hosts(command: str) -> dict:
    import subprocess

    out, worst = "", 0
    for name in sorted(os.listdir("hosts")):
        home = os.path.abspath(f"hosts/{name}")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=home,
            text=True,
            capture_output=True,
            env={**os.environ, "HOME": home},
            stdin=subprocess.DEVNULL,
        )
        out, worst = out + done.stdout, max(worst, done.returncode)
        sys.stderr.write(done.stderr)
    return {"rc": worst, "stdout": out}


def imagined_host(kind: str) -> dict:
    """A host without a disk: bare, then set up, then it ends at once and well."""
    mark = {"ssh setup": "setup", "ssh start": "started"}.get(kind)
    if mark:
        open(mark, "w").close()
    if kind != "ssh status":
        return {}
    state = "exited 0" if os.path.exists("started") else "idle" if os.path.exists("setup") else "bare"
    return {"stdout": f"bertjax-host w0 {state}\n"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
