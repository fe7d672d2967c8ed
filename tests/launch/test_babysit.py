"""launch/babysit.sh: what it does about each end of a run, and about each way to lose a slice."""

import pathlib
import shutil
import sys

import pytest

TRAIN = "-- python -m bertjax.main --config=configs/base.py --workdir=gs://b/run"
START = ["true", "status", "scp", "unpack", "setup", "start"]  # on bare hosts
AGAIN = ["true", "status", "start"]  # on hosts that are set up
CREATE = ["describe", "create", "describe"]
DONE = ["status", "log"]
CAPACITY = "ERROR: There is no more capacity in the zone\n"
QUOTA = "ERROR: Quota limit 'TPU' has been exceeded. RESOURCE_EXHAUSTED\n"
OFFLINE = "ERROR: gcloud crashed (TransportError): Max retries exceeded, gcloud auth login\n"


def babysit(cloud, flags="", train=TRAIN, **environment):
    return cloud.run(f"babysit.sh bert --type=v5e-16 {flags} {train}", **environment)


def ended(*codes):
    return [{"stdout": f"bertjax-host w0 exited {code}\n"} for code in codes]


BARE = {"stdout": "bertjax-host w0 bare\n"}
IDLE = {"stdout": "bertjax-host w0 idle\n"}
RUNNING = {"stdout": "bertjax-host w0 running\n"}


def unreachable(state=None):
    return {"rc": 255, "stderr": "ssh: connect to host: Connection timed out\n"} | (
        {} if state is None else {"slice": state}
    )


def test_an_undisturbed_run(cloud):
    done = babysit(cloud)
    assert (done.returncode, cloud.story) == (0, CREATE + START + DONE)
    assert "bert still exists and is billed" in done.stderr


def test_the_slice_is_deleted_at_the_end_only_where_asked(cloud):
    done = babysit(cloud, "--delete_when_done")
    assert (done.returncode, cloud.story) == (0, CREATE + START + DONE + ["delete"])
    assert not (cloud.root / "slice").exists()


def test_a_spot_slice_pre_empted_in_the_middle_of_the_run_is_made_again_and_the_run_goes_on(cloud):
    cloud.plays({"ssh status": [BARE, RUNNING, RUNNING, unreachable("PREEMPTED")]})
    done = babysit(cloud, "--spot")
    assert done.returncode == 0, done.stderr
    assert cloud.story == (
        CREATE
        + START
        + ["status"] * 3  # running, running, no answer
        + ["describe", "describe", "delete", "create", "describe"]
        + START
        + DONE
    )
    starts = [words for words in cloud.calls if " start " in words[-1]]
    assert starts[0] == starts[1]  # the same command: bertjax.main resumes from its checkpoint
    creations = [words for words in cloud.calls if words[3] == "create"]
    assert creations[0] == creations[1] and "--spot" in creations[0]


def test_a_suspended_queued_resource_is_deleted_with_its_nodes_and_asked_for_again(cloud):
    cloud.plays(
        {
            "ssh status": [BARE, RUNNING, unreachable("SUSPENDED")],
            "queued-resources describe": [
                {"rc": 1, "stderr": "ERROR: NOT_FOUND\n"},
                {"stdout": "WAITING_FOR_RESOURCES\n"},
                {"stdout": "ACTIVE\n"},
                {"stdout": "ACTIVE\n"},
            ],
        }
    )
    done = babysit(cloud, "--queued --spot")
    assert done.returncode == 0, done.stderr
    deletion = [words for words in cloud.calls if words[3] == "delete"]
    assert len(deletion) == 1 and "--force" in deletion[0]
    assert cloud.story.count("create") == cloud.story.count("start") == 2
    assert {words[2] for words in cloud.calls} == {"queued-resources"}


def test_a_deletion_refused_while_suspending_is_tried_again(cloud):
    cloud.has_slice("SUSPENDING")
    cloud.plays({"queued-resources delete": [{"rc": 1, "stderr": "FAILED_PRECONDITION\n"}] * 2})
    assert babysit(cloud, "--queued").returncode == 0
    assert cloud.story[:6] == ["describe"] + ["delete"] * 3 + ["create", "describe"]


def test_a_run_that_saved_and_stopped_is_started_again_without_setting_up(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [IDLE, *ended(75, 75, 0)]})
    assert babysit(cloud).returncode == 0
    assert cloud.story == ["describe", *AGAIN, "status", "describe", *AGAIN, *DONE]


def test_refused_settings_are_not_tried_again(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [IDLE, *ended(2)]})
    done = babysit(cloud)
    assert (done.returncode, cloud.story.count("start")) == (2, 1)
    assert cloud.story[-1] == "log"  # the refusal is shown


def test_failures_in_a_row_are_bounded(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [IDLE, *ended(*[1] * 20)]})
    done = babysit(cloud, "--max_failures=2")
    assert (done.returncode, cloud.story.count("start")) == (1, 3)
    assert "failed 3 times in a row, the last time with exit code 1" in done.stderr


def test_a_long_run_clears_the_count_of_failures(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [IDLE, *ended(1, 1, 1, 1, 1, 1, 0)]})
    assert babysit(cloud, "--max_failures=0", BERTJAX_HEALTHY_SECONDS="9999").returncode == 1
    cloud.plays({"ssh status": [IDLE, *ended(1, 1, 0)]})
    assert babysit(cloud, "--max_failures=1", BERTJAX_HEALTHY_SECONDS="0").returncode == 0


def test_restarts_are_bounded(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [IDLE, *ended(*[75] * 20)]})
    done = babysit(cloud, "--max_restarts=2")
    assert (done.returncode, cloud.story.count("start")) == (1, 3)
    assert "gave up after 2 restarts" in done.stderr


def test_a_run_that_is_going_is_watched_and_not_started_again(cloud):
    cloud.has_slice("READY", setup=True, started=True)
    cloud.plays({"ssh status": [RUNNING]})
    assert babysit(cloud).returncode == 0
    assert cloud.story == ["describe", "true", "status", *DONE]


def test_a_run_that_ended_while_nobody_watched_is_done(cloud):
    cloud.has_slice("READY", setup=True, started=True)
    assert babysit(cloud).returncode == 0
    assert "start" not in cloud.story


def test_another_command_on_the_slice_is_left_alone(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays({"ssh status": [{"stdout": "bertjax-host w0 other\n"}]})
    done = babysit(cloud)
    assert done.returncode == 1 and not {"start", "stop", "scp"} & set(cloud.story)
    assert "another command is running" in done.stderr


def test_ssh_that_is_not_ready_twice_is_waited_for(cloud):
    cloud.plays({"ssh true": [unreachable()] * 2})
    assert babysit(cloud).returncode == 0
    assert cloud.story == CREATE + ["true"] * 2 + START + DONE


def test_a_ready_slice_is_not_deleted_because_its_hosts_are_silent(cloud):
    """The fault may be this side's network; the run may go on."""
    cloud.has_slice("READY", setup=True, started=True)
    cloud.plays({"ssh status": [RUNNING, *[unreachable()] * 40], "ssh true": [{}] * 9})
    done = babysit(cloud, "--max_failures=0")
    assert (done.returncode, (cloud.root / "slice").read_text()) == (5, "READY")
    assert not {"delete", "create", "stop"} & set(cloud.story)


def test_being_offline_is_waited_out_without_touching_the_slice(cloud):
    cloud.has_slice("READY", setup=True, started=True)
    cloud.plays(
        {
            "ssh status": [RUNNING, *[{"rc": 1, "stderr": OFFLINE}] * 2],
            "tpu-vm describe": [{"stdout": "READY\n"}, *[{"rc": 1, "stderr": OFFLINE}] * 8],
        }
    )
    done = babysit(cloud)
    assert done.returncode == 0, done.stderr
    assert set(cloud.story) == {"describe", "true", "status", "log"}
    assert "gcloud does not answer; looking again" in done.stderr


def test_being_offline_between_two_runs_is_waited_out(cloud):
    cloud.has_slice("READY", setup=True)
    cloud.plays(
        {
            "ssh status": [IDLE, *ended(75, 75, 0)],
            "tpu-vm describe": [{"stdout": "READY\n"}, *[{"rc": 1, "stderr": OFFLINE}] * 3],
        }
    )
    assert babysit(cloud).returncode == 0
    assert cloud.story.count("describe") == 5 and cloud.story.count("start") == 2


def test_a_copy_that_failed_is_not_unpacked(cloud):
    cloud.plays({"tpu-vm scp": [{"rc": 1, "stderr": "lost connection\n"}]})
    assert babysit(cloud).returncode == 0
    first = cloud.story.index("scp")
    assert "unpack" not in cloud.story[first : cloud.story.index("scp", first + 1)]


def test_hosts_that_wait_for_a_dead_peer_are_stopped_and_all_start_again(cloud):
    cloud.has_slice("READY", setup=True)
    half = {"stdout": "bertjax-host w0 exited 134\nbertjax-host w1 running\n"}
    cloud.plays({"ssh status": [IDLE, half, half, half, *ended(134, 0)]})
    done = babysit(cloud, BERTJAX_GRACE="2")
    assert done.returncode == 0, done.stderr
    assert cloud.story == ["describe", *AGAIN, *["status"] * 3, "stop", "complaint", "describe", *AGAIN, *DONE]


def test_hosts_that_end_well_one_after_the_other_are_given_their_time(cloud):
    cloud.has_slice("READY", setup=True)
    last = {"stdout": "bertjax-host w0 running\nbertjax-host w1 exited 0\n"}
    both = {"stdout": "bertjax-host w0 exited 0\nbertjax-host w1 exited 0\n"}
    cloud.plays({"ssh status": [IDLE, *[last] * 9, both]})
    assert babysit(cloud, BERTJAX_GRACE="2").returncode == 0
    assert "stop" not in cloud.story


@pytest.mark.parametrize(
    ("codes", "starts"), [((0, 0), 1), ((75, 75), 2), ((75, 134), 2), ((2, 75), 1), ((2, 134), 1), ((1, 0), 2)]
)
def test_the_code_of_many_hosts_is_the_one_that_decides(cloud, codes, starts):
    cloud.has_slice("READY", setup=True)
    both = {"stdout": "".join(f"bertjax-host w{n} exited {c}\n" for n, c in enumerate(codes))}
    cloud.plays({"ssh status": [IDLE, both, IDLE, *ended(0)]})
    done = babysit(cloud)
    assert cloud.story.count("start") == starts
    assert done.returncode == (2 if 2 in codes else 0)


def test_a_host_that_was_restarted_counts_as_a_failure_and_the_run_starts_again(cloud):
    cloud.has_slice("READY", setup=True)
    lost = {"stdout": "bertjax-host w0 lost\n"}
    cloud.plays({"ssh status": [IDLE, RUNNING, lost, lost, *ended(0)]})
    assert babysit(cloud).returncode == 0
    assert cloud.story.count("start") == 2


def test_no_quota_at_first_is_final(cloud):
    cloud.plays({"tpu-vm create": [{"rc": 1, "stderr": QUOTA}]})
    assert (babysit(cloud).returncode, cloud.story) == (3, ["describe", "create"])


def test_the_quota_of_a_slice_that_was_just_deleted_is_waited_for(cloud):
    cloud.plays(
        {
            "ssh status": [BARE, unreachable("PREEMPTED")],
            "tpu-vm create": [{"slice": "READY"}, *[{"rc": 1, "stderr": QUOTA}] * 2],
        }
    )
    done = babysit(cloud, "--spot")
    assert (done.returncode, cloud.story.count("create")) == (0, 4)


def test_no_capacity_for_the_new_slice_is_tried_again(cloud):
    cloud.plays(
        {
            "ssh status": [BARE, unreachable("PREEMPTED")],
            "tpu-vm create": [{"slice": "READY"}, *[{"rc": 1, "stderr": CAPACITY}] * 2],
        }
    )
    assert (babysit(cloud, "--spot").returncode, cloud.story.count("create")) == (0, 4)


def test_queued_requests_that_always_fail_are_bounded(cloud):
    cloud.plays({"queued-resources create": [{"slice": "FAILED"}] * 20})
    done = babysit(cloud, "--queued", BERTJAX_ATTEMPTS="3")
    assert (done.returncode, cloud.story.count("create")) == (4, 3)


def test_a_slice_taken_away_while_it_is_set_up_is_no_failure_of_the_run(cloud):
    cloud.plays({"tpu-vm scp": [unreachable("PREEMPTED")]})
    done = babysit(cloud, "--spot --max_failures=0")
    assert (done.returncode, cloud.story.count("create")) == (0, 2), done.stderr


def test_a_failed_installation_starts_nothing(cloud):
    cloud.plays({"ssh setup": [{"rc": 1, "stderr": "no such package\n"}] * 9})
    done = babysit(cloud, "--max_failures=1")
    assert (done.returncode, cloud.story.count("setup")) == (5, 2)
    assert "start" not in cloud.story


def test_a_slice_that_its_owner_stopped_is_not_deleted(cloud):
    cloud.has_slice("STOPPED")
    done = babysit(cloud)
    assert (done.returncode, cloud.story) == (1, ["describe"])
    assert "gcloud compute tpus tpu-vm start bert" in done.stderr


def test_a_missing_login_is_explained(cloud):
    cloud.plays({"tpu-vm describe": [{"rc": 1, "stderr": "You do not currently have an active account selected\n"}]})
    done = babysit(cloud)
    assert (done.returncode, cloud.story) == (1, ["describe"])
    assert "gcloud auth login" in done.stderr


def test_a_dry_run_prints_the_whole_way_and_runs_nothing(cloud):
    done = babysit(cloud, "--spot --dry_run --delete_when_done")
    assert (done.returncode, cloud.calls) == (0, [])
    printed = [line.split()[4] for line in done.stdout.splitlines()]
    assert printed == [
        "describe",
        "create",
        "describe",
        "ssh",
        "ssh",
        "scp",
        "ssh",
        "ssh",
        "ssh",
        "ssh",
        "ssh",
        "delete",
    ]


@pytest.mark.parametrize(
    ("flags", "train", "message"),
    [
        ("", "", "no command"),
        ("", "-- python -m bertjax.main --workdir=runs/a", "gs://BUCKET/RUN"),
        ("--max_failures=many", TRAIN, "not a whole number"),
        ("", TRAIN + " --dry_run", "stands after --"),
    ],
)
def test_wrong_usage_is_refused_before_any_call(cloud, flags, train, message):
    done = babysit(cloud, flags, train)
    assert (done.returncode, cloud.calls) == (2, [])
    assert message in done.stderr


def test_real_hosts_through_a_stop_and_a_crash(cloud, small_repo):
    """The whole way with the real host.sh on two imagined hosts: the first start asks to be started
    again, the second crashes (134), the third ends. Arguments arrive as they were given."""
    cloud.repo = small_repo
    for name in ("w0", "w1"):
        (cloud.root / "hosts" / name).mkdir(parents=True)
    shared = cloud.root / "bucket"  # outlives the hosts
    shared.mkdir()
    script = small_repo / "job.sh"
    script.write_text(
        'n=$(cat "$1/$(basename "$HOME")" 2>/dev/null || echo 0); n=$((n + 1))\n'
        'echo "$n" >"$1/$(basename "$HOME")"; printf "%s|" "$2" tracked.py: \n'
        "cat tracked.py; echo\n"
        "case $n in 1) exit 75 ;; 2) exit 134 ;; esac\n"
    )
    uv = pathlib.Path(cloud.environment["PATH"].split(":")[0]) / "uv"
    uv.write_text(
        f'#!/bin/sh\n[ "$1" != venv ] || {{ mkdir -p "$HOME/bertjax/venv/bin" && '
        f'ln -sf "{sys.executable}" "$HOME/bertjax/venv/bin/python"; }}\n'
    )
    uv.chmod(0o755)
    done = cloud.run(
        ["launch/babysit.sh", "bert", "--type=v5e-16", "--", "bash", "job.sh", str(shared), 'it\'s "quoted" $HOME *'],
        BERTJAX_POLL="0.05",
    )
    assert done.returncode == 0, done.stderr
    assert [(shared / name).read_text() for name in ("w0", "w1")] == ["3\n", "3\n"]
    log = (cloud.root / "hosts" / "w1" / "bertjax" / "run" / "log").read_text()
    assert log.count('it\'s "quoted" $HOME *|tracked.py:|changed') == 3
    assert shutil.which("setsid"), "host.sh detaches jobs with setsid"
