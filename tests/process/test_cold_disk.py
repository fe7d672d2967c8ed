"""What is read ahead of the imports of a start."""

import subprocess
import sys

READ = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from bertjax.process import cold_disk
for thread in cold_disk.read_ahead(["one", "absent"]):
    thread.join()
print(*(path for path in opened if path.startswith(sys.argv[1])), sep="\\n")
"""


def test_compiled_modules_and_libraries_of_a_package_are_read_and_nothing_else(tmp_path):
    tag = sys.implementation.cache_tag
    wanted = {f"one/__pycache__/a.{tag}.pyc", f"one/deep/__pycache__/b.{tag}.pyc", "one/deep/lib.so"}
    others = {"one/a.py", "one/data.bin", "one/__pycache__/a.cpython-27.pyc", "one/tests/lib.so", "two/lib.so"}
    for name in wanted | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 100)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    command = [sys.executable, "-c", path + READ, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {line.removeprefix(f"{tmp_path}/") for line in printed.split()} == wanted
