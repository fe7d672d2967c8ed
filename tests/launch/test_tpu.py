"""launch/tpu.sh: the exact gcloud commands, what is tried again, and what is refused."""

import shlex
import shutil
import tarfile

import pytest

SSH = "--ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=30 --quiet"
# Messages as gcloud prints them (public bug reports of other projects).
QUOTA = (
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) HttpError 429: "Quota limit '
    "'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region "
    'us-east5.", "status": "RESOURCE_EXHAUSTED"\n'
)
CAPACITY = (
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) {"code": 8, "message": "There is no more '
    'capacity in the zone \\"us-west4-a\\"; you can try in another zone"}\n'
)
NOT_READY = "ssh: connect to host 10.0.0.2 port 22: Connection refused\n"
PERMISSION = "ERROR: PERMISSION_DENIED: The caller does not have permission\n"
TRAIN = "-- python -m bertjax.main --config=configs/base.py --workdir=gs://b/run"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--type=v4-32", "tpu-vm create bert --zone=us-west4-a --accelerator-type=v4-32 --version=tpu-ubuntu2204-base"),
        (
            "--type=v5e-16 --spot",
            "tpu-vm create bert --zone=us-west4-a --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot",
        ),
        (
            "--type=v5p-16 --reserved --project=p",
            "tpu-vm create bert --zone=us-west4-a --project=p --accelerator-type=v5p-16 "
            "--version=v2-alpha-tpuv5 --reserved",
        ),
        (
            "--type=v6e-16 --queued --spot --valid_until=6h",
            "queued-resources create bert --zone=us-west4-a --accelerator-type=v6e-16 "
            "--runtime-version=v2-alpha-tpuv6e --node-id=bert --spot --valid-until-duration=6h",
        ),
        (
            "--type=v5p-16 --slices=2 --create_flag=--network=n",
            "queued-resources create bert --zone=us-west4-a --accelerator-type=v5p-16 "
            "--runtime-version=v2-alpha-tpuv5 --node-count=2 --node-prefix=bert --network=n",
        ),
    ],
)
def test_create_asks_for_the_slice_that_the_flags_describe(cloud, flags, expected):
    dry = cloud.run(f"tpu.sh create bert {flags} --dry_run")
    assert dry.stdout.splitlines()[0] == f"gcloud compute tpus {expected} --quiet"
    assert cloud.run(f"tpu.sh create bert {flags}").returncode == 0
    assert cloud.calls[0] == shlex.split(f"compute tpus {expected} --quiet")
    assert cloud.story == ["create", "describe", "true"]


def test_commands_for_a_multislice_reach_every_host_of_every_slice(cloud):
    dry = cloud.run(f"tpu.sh run bert --queued --dry_run {TRAIN}").stdout
    assert dry.startswith(
        "gcloud compute tpus queued-resources ssh bert --zone=us-west4-a "
        f"--node=all --worker=all {SSH} '--command=bash "
    )


@pytest.mark.parametrize(
    "command",
    [
        "create bert --type=v5e-16 --spot",
        "create bert --type=v4-16 --slices=2 --valid_until=1d",
        "setup bert",
        "setup bert --queued",
        "copy bert",
        f"run bert {TRAIN}",
        "exec bert -- df -h",
        "logs bert --follow",
        "logs bert --queued --node=1 --worker=2",
        "status bert",
        "status bert --queued",
        "stop bert",
        "ssh bert --worker=2",
        "delete bert",
        "delete bert --queued",
    ],
)
def test_a_dry_run_prints_commands_that_gcloud_parses_and_runs_none(cloud, command):
    first, _, rest = command.partition(" -- ")
    done = cloud.run(f"tpu.sh {first} --project=p --dry_run{' -- ' + rest if rest else ''}")
    assert done.returncode == 0, done.stderr
    assert cloud.calls == []
    lines = [line for line in done.stdout.splitlines() if line.startswith("gcloud ")]
    assert lines
    cloud.has_slice("READY")
    for line in lines:
        if " scp " not in line:  # its archive is not there in a dry run
            assert cloud.run(["bash", "-c", line]).returncode != 2, line
        assert "--project=p" in shlex.split(line)


def test_quota_is_not_tried_again(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": QUOTA}]})
    done = cloud.run("tpu.sh create bert --type=v6e-16 --spot")
    assert (done.returncode, cloud.story) == (3, ["create"])
    assert "quota" in done.stderr and "Limit: 0 in region us-east5" in done.stderr


def test_no_capacity_is_tried_again(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": CAPACITY}] * 2})
    done = cloud.run("tpu.sh create bert --type=v5e-16")
    assert (done.returncode, cloud.story) == (0, ["create"] * 3 + ["describe", "true"])


def test_no_capacity_is_given_up_after_the_allowed_attempts(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": CAPACITY}] * 9})
    done = cloud.run("tpu.sh create bert --type=v5e-16", BERTJAX_ATTEMPTS="3")
    assert (done.returncode, cloud.story) == (4, ["create"] * 3)
    assert "try another zone" in done.stderr


def test_pauses_double_up_to_the_longest(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": CAPACITY}] * 9})
    (cloud.root.parent / "bin" / "sleep").write_text(f'#!/bin/sh\necho "$1" >>{cloud.root}/slept\n')
    (cloud.root.parent / "bin" / "sleep").chmod(0o755)
    cloud.run("tpu.sh create bert --type=v5e-16", BERTJAX_BACKOFF="15", BERTJAX_BACKOFF_MAX="100", BERTJAX_ATTEMPTS="6")
    assert (cloud.root / "slept").read_text().split() == ["15", "30", "60", "100", "100"]


def test_a_creation_whose_answer_was_lost_counts(cloud):
    cloud.plays(
        {
            "tpu-vm create": [
                {"rc": 1, "stderr": "ERROR: 503 UNAVAILABLE\n", "slice": "READY"},
                {"rc": 1, "stderr": "ERROR: ALREADY_EXISTS: Resource bert already exists\n"},
            ]
        }
    )
    assert cloud.run("tpu.sh create bert --type=v5e-16").returncode == 0


def test_a_slice_of_the_same_name_is_not_taken_over(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": "ERROR: ALREADY_EXISTS\n"}]})
    done = cloud.run("tpu.sh create bert --type=v5e-16")
    assert (done.returncode, cloud.story) == (1, ["create"])
    assert "exists already" in done.stderr


def test_a_missing_permission_is_explained_and_not_tried_again(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": PERMISSION}]})
    done = cloud.run("tpu.sh create bert --type=v5e-16")
    assert (done.returncode, cloud.story) == (1, ["create"])
    assert "gcloud services enable tpu.googleapis.com" in done.stderr


def test_create_waits_through_the_queue(cloud):
    cloud.plays(
        {
            "queued-resources describe": [
                {"stdout": f"{state}\n"} for state in ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
            ]
        }
    )
    done = cloud.run("tpu.sh create bert --type=v5e-16 --queued")
    assert (done.returncode, cloud.story) == (0, ["create"] + ["describe"] * 3 + ["true"])


def test_create_does_not_wait_for_ever_in_the_queue(cloud):
    cloud.plays({"queued-resources describe": [{"stdout": "WAITING_FOR_RESOURCES\n"}] * 9})
    done = cloud.run("tpu.sh create bert --type=v5e-16 --queued --max_wait=3")
    assert (done.returncode, cloud.story) == (4, ["create"] + ["describe"] * 4)


def test_create_fails_when_the_queued_request_does(cloud):
    cloud.plays({"queued-resources describe": [{"stdout": "FAILED\n"}]})
    done = cloud.run("tpu.sh create bert --type=v5e-16 --queued")
    assert done.returncode == 1 and "FAILED" in done.stderr


def test_ssh_that_is_not_ready_twice_is_waited_for(cloud):
    cloud.plays({"ssh true": [{"rc": 255, "stderr": NOT_READY}] * 2})
    done = cloud.run("tpu.sh create bert --type=v5e-16")
    assert (done.returncode, cloud.story) == (0, ["create", "describe"] + ["true"] * 3)


def test_ssh_that_is_never_ready_is_given_up_with_the_usual_causes(cloud):
    cloud.plays({"ssh true": [{"rc": 255, "stderr": NOT_READY}] * 9})
    done = cloud.run("tpu.sh create bert --type=v5e-16")
    assert (done.returncode, cloud.story.count("true")) == (5, 4)
    assert "--ssh_flag=--internal-ip" in done.stderr and "ssh-add" in done.stderr


def test_a_queued_resource_is_recognised_without_the_flag(cloud):
    cloud.has_slice("ACTIVE")
    assert cloud.run("tpu.sh stop bert").returncode == 0
    assert [words[2] for words in cloud.calls] == ["queued-resources"] * 2


def test_setup_copies_then_installs(cloud):
    cloud.has_slice("READY")
    assert cloud.run("tpu.sh setup bert").returncode == 0
    assert cloud.story == ["describe", "true", "scp", "unpack", "setup"]


def test_setup_stops_at_the_first_failure(cloud):
    cloud.has_slice("READY")
    cloud.plays({"tpu-vm scp": [{"rc": 1, "stderr": "lost connection\n"}]})
    assert cloud.run("tpu.sh setup bert").returncode == 1
    assert cloud.story[-1] == "scp"


def test_copy_takes_the_work_tree_without_what_git_ignores(cloud, small_repo):
    cloud.repo = small_repo
    cloud.has_slice("READY")
    done = cloud.run("tpu.sh copy bert")
    assert done.returncode == 0, done.stderr
    with tarfile.open(cloud.root / "copied.tar.gz") as archive:
        names = set(archive.getnames())
        assert archive.extractfile("tracked.py").read() == b"changed"
    assert {"untracked.py", "with space.txt", "launch/host.sh"} <= names
    assert not {"deleted.py", "runs/model.bin"} & names


def test_copy_works_without_git(cloud, small_repo):
    shutil.rmtree(small_repo / ".git")
    cloud.repo = small_repo
    cloud.has_slice("READY")
    assert cloud.run("tpu.sh copy bert").returncode == 0
    with tarfile.open(cloud.root / "copied.tar.gz") as archive:
        assert "./untracked.py" in archive.getnames()
        assert "./runs/model.bin" not in archive.getnames()


@pytest.mark.parametrize("workdir", ["", "--workdir=runs/a", "--workdir runs/a", "--workdir=./a", "--workdir="])
def test_a_work_directory_on_the_hosts_own_disks_is_refused(cloud, workdir):
    done = cloud.run(f"tpu.sh run bert -- python -m bertjax.main --config=c.py {workdir}")
    assert (done.returncode, cloud.calls) == (2, [])
    assert "gs://BUCKET/RUN" in done.stderr


@pytest.mark.parametrize("workdir", ["--workdir=gs://b/r", "--workdir gs://b/r", "--workdir=/nfs/r"])
def test_a_shared_work_directory_is_accepted(cloud, workdir):
    cloud.has_slice("READY")
    done = cloud.run(f"tpu.sh run bert -- python -m bertjax.main --config=c.py {workdir}")
    assert (done.returncode, cloud.story) == (0, ["describe", "start"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"run bert {TRAIN} --dry_run", "stands after --"),  # else the slice would be used and paid for
        (f"run bert {TRAIN} --zone=z", "stands after --"),
        ("run bert", "no command"),
        ("exec bert --", "no command"),
        ("create bert --type=v5e-16 --color=red", "unknown flag --color"),
        ("create bert --type", "without its value"),
        ("create bert --type=v5e-16 --spot=yes", "takes no value"),
        ("create bert --type=v5e-16 --slices=two", "not a whole number"),
        ("create bert --type=v5e-16 --slices=0", "at least 1"),
        ("create bert", "no accelerator"),
        ("create bert --type=v9-8", "give --version"),
        ("create bert --type=tpu7x-16", "launch/gke.sh"),
        ("create bert --type=v5e-16 --spot --reserved", "exclude each other"),
        ("create bert --type=v5e-16 --valid_until=6h", "add --queued"),
        ("create Bert_1 --type=v5e-16", "cannot name a slice"),
        ("create --type=v5e-16", "cannot name a slice"),
        ("status bert other", "unexpected argument 'other'"),
        ("begin bert", "unknown command 'begin'"),
    ],
)
def test_wrong_usage_is_refused_before_any_call(cloud, command, message):
    done = cloud.run(f"tpu.sh {command}")
    assert (done.returncode, cloud.calls) == (2, [])
    assert message in done.stderr


def test_the_zone_must_be_given(cloud):
    done = cloud.run("tpu.sh status bert", BERTJAX_ZONE="")
    assert (done.returncode, cloud.calls) == (2, [])
    assert "--zone=ZONE or set BERTJAX_ZONE" in done.stderr


@pytest.mark.parametrize(
    "command", ["tpu.sh status bert", "tpu.sh delete bert --yes", f"babysit.sh bert --type=v4-8 {TRAIN}"]
)
def test_without_gcloud_nothing_is_said_of_a_slice(cloud, command, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "cksum", "cut", "dirname", "grep", "mktemp", "rm", "sleep"):
        (programs / name).symlink_to(shutil.which(name))
    done = cloud.run(command, PATH=str(programs))
    assert (done.returncode, done.stdout) == (2, "")
    assert "gcloud is not on PATH" in done.stderr


def test_status_shows_slice_and_hosts(cloud):
    cloud.has_slice("READY", setup=True)
    assert cloud.run("tpu.sh status bert").stdout == "bert: READY\nbertjax-host w0 idle\n"
    cloud.has_slice("PREEMPTED")
    assert cloud.run("tpu.sh status bert").stdout == "bert: GONE PREEMPTED\n"


@pytest.mark.parametrize("command", [f"run bert {TRAIN}", "stop bert", "logs bert", "exec bert -- ls"])
def test_hosts_that_are_not_set_up_are_told_with_the_remedy(cloud, command):
    cloud.has_slice("READY")
    (cloud.root / "hosts" / "w0").mkdir(parents=True)
    done = cloud.run(f"tpu.sh {command}")
    assert done.returncode != 0
    assert "the hosts of bert are not set up: launch/tpu.sh setup bert --zone=us-west4-a" in done.stderr


def test_logs_name_one_host(cloud):
    cloud.has_slice("ACTIVE")
    cloud.run("tpu.sh logs bert --node=1 --worker=3 --follow")
    assert {"--node=1", "--worker=3", "--command=bash bertjax/code/launch/host.sh log 200 follow"} <= set(
        cloud.calls[-1]
    )


@pytest.mark.parametrize(
    ("answer", "flag", "deleted"), [("n\n", "", False), ("", "", False), ("y\n", "", True), ("", "--yes", True)]
)
def test_delete_asks_first(cloud, answer, flag, deleted):
    cloud.has_slice("READY")
    done = cloud.run(f"tpu.sh delete bert {flag}", stdin=answer)
    assert (done.returncode == 0, "delete" in cloud.story) == (deleted, deleted)


def test_deleting_a_slice_that_is_not_there_is_no_failure_and_not_called_deleted(cloud):
    done = cloud.run("tpu.sh delete bert --yes")
    assert done.returncode == 0
    assert "there is no bert in us-" in done.stderr and "is deleted" not in done.stderr


def test_a_slice_that_cannot_be_deleted_is_reported_as_still_billed(cloud):
    cloud.has_slice("READY")
    cloud.plays({"tpu-vm delete": [{"rc": 1, "stderr": "ERROR: FAILED_PRECONDITION\n"}] * 9})
    done = cloud.run("tpu.sh delete bert --yes")
    assert (done.returncode, cloud.story.count("delete")) == (1, 4)
    assert "may still be billed" in done.stderr
