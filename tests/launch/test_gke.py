"""launch/gke.sh: the manifest that the flags describe, and what is refused."""

import shutil

import pytest

from tests.launch.conftest import make_program

yaml = pytest.importorskip("yaml")

FLAGS = "--image=r/bertjax:tpu --type=v5e --topology=4x4"
TRAIN = "-- --config=configs/base.py --workdir=gs://b/run"


def manifest(cloud, flags=FLAGS, train=TRAIN):
    done = cloud.run(f"gke.sh bert {flags} --dry_run {train}")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def job(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize(
    ("flags", "hosts", "slices", "accelerator"),
    [
        ("--type=v5e --topology=4x4", 4, 1, "tpu-v5-lite-podslice"),
        ("--type=v5e --topology=2x4 --chips_per_host=8", 1, 1, "tpu-v5-lite-podslice"),
        ("--type=v4 --topology=2x2x4 --slices=3", 4, 3, "tpu-v4-podslice"),
        ("--type=v5p --topology=2x2x2", 2, 1, "tpu-v5p-slice"),
        ("--type=v6e --topology=16x16", 64, 1, "tpu-v6e-slice"),
    ],
)
def test_one_pod_a_host_and_one_job_a_slice(cloud, flags, hosts, slices, accelerator):
    document = manifest(cloud, f"--image=i {flags}")
    assert document["spec"]["replicatedJobs"][0]["replicas"] == slices
    spec = job(document)
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (hosts, hosts, 0)
    selector = spec["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert "cloud.google.com/gke-spot" not in selector


def test_pre_emptions_start_again_and_refused_settings_do_not(cloud):
    document = manifest(cloud, FLAGS + " --spot --max_restarts=7")
    assert document["spec"]["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    assert job(document)["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "bertjax", "operator": "In", "values": [2]}}
    ]
    pod = job(document)["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_flags_arrive_as_given(cloud):
    document = manifest(cloud, train=TRAIN + """ '--config.log.fill_mask=("a \\ [MASK]: #b",)'""")
    container = job(document)["template"]["spec"]["containers"][0]
    assert container["args"] == [
        "--config=configs/base.py",
        "--workdir=gs://b/run",
        '--config.log.fill_mask=("a \\ [MASK]: #b",)',
    ]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}


def test_the_manifest_goes_to_kubectl(cloud):
    kubectl = cloud.root.parent / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$*" >{cloud.root}/words\ncat >{cloud.root}/applied\n')
    kubectl.chmod(0o755)
    assert cloud.run(f"gke.sh bert {FLAGS} {TRAIN}").returncode == 0
    assert (cloud.root / "words").read_text() == "apply -f -\n"
    assert yaml.safe_load((cloud.root / "applied").read_text()) == manifest(cloud)


@pytest.mark.parametrize(("answer", "is_told"), [("created", False), ("unchanged", True)])
def test_a_job_that_is_there_already_is_told_since_kubectl_starts_nothing(cloud, answer, is_told):
    make_program(cloud.root.parent / "bin" / "kubectl", f"#!/bin/sh\ncat >/dev/null\necho jobset/bert {answer}\n")
    done = cloud.run(f"gke.sh bert {FLAGS} {TRAIN}")
    assert (done.returncode, done.stdout) == (0, f"jobset/bert {answer}\n")
    assert ("kubectl delete jobset bert" in done.stderr) == is_told


def test_without_kubectl_it_is_named(cloud, tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "bash").symlink_to(shutil.which("bash"))
    done = cloud.run(f"gke.sh bert {FLAGS} {TRAIN}", PATH=str(tmp_path / "programs"))
    assert (done.returncode, done.stderr) == (2, "bertjax: kubectl is not on PATH: install it, or give --dry_run\n")


@pytest.mark.parametrize(
    ("flags", "train", "message"),
    [
        ("--type=v5e --topology=4x4", TRAIN, "--image=IMAGE"),
        ("--image=i --type=v9 --topology=4x4", TRAIN, "none of v4, v5e, v5p, v6e"),
        ("--image=i --type=v5e --topology=16", TRAIN, "not like 4x4"),
        ("--image=i --type=v5e --topology=1x1", TRAIN, "give --chips_per_host"),
        (FLAGS, "-- --config=c.py --workdir=/tmp/a", "--workdir=gs://"),
        (FLAGS, "", "--workdir=gs://"),
        (FLAGS + " --colour=red", TRAIN, "unknown flag --colour"),
        (FLAGS + " --slices=two", TRAIN, "not a whole number"),
        (FLAGS + " --chips_per_host=08", TRAIN, "not a whole number"),
        ("--image=i --type=v5e --topology=08x08", TRAIN, "not like 4x4"),
        (FLAGS + " --service_account=$'a\\n hostNetwork: true'", TRAIN, "service_account"),
        (FLAGS + " --namespace=$'a\\nb: c'", TRAIN, "namespace"),
        (FLAGS + " '--namespace=a: b'", TRAIN, "namespace"),
        (FLAGS + " '--namespace={a}'", TRAIN, "namespace"),
        ("--type=v5e --topology=4x4 --image='i\" # '", TRAIN, "no name of an image"),
        ("--type=v5e --topology=4x4 --image=$'i\\nb: c'", TRAIN, "no name of an image"),
        (FLAGS + " --user=$'1\\n0'", TRAIN, "not a whole number"),
        (FLAGS, TRAIN + " $'--config.init_from=a\\nb'", "control character"),
    ],
)
def test_wrong_usage_is_refused(cloud, flags, train, message):
    done = cloud.run(f"gke.sh bert {flags} --dry_run {train}")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_pod_is_root_without_privileges_or_the_user_that_is_asked_for(cloud):
    pod = job(manifest(cloud))["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 0
    assert pod["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}
    pod = job(manifest(cloud, FLAGS + " --user=1000"))["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
