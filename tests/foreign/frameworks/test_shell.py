"""Launch scripts are expanded as a shell would, and nothing in them runs."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.foreign.texts.arithmetic import NotANumber, arithmetic_value
from autopar.foreign.texts.expansion import Script, is_known, shown_value
from autopar.foreign.texts.shell import read_script
from autopar.foreign.texts.shell_commands import parse


def words_of(text: str, name: str = "run") -> tuple[str, ...]:
    """The words of the last command called `name`."""
    return next(words for words, _ in reversed(read_script(text).commands) if words[0] == name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=4\nrun $A ${A} x${A}y '$A' \"$A\"", ("run", "4", "4", "x4y", "$A", "4")),
        ("A='--tp 4 --pp 2'\nrun $A", ("run", "--tp", "4", "--pp", "2")),
        ("A='--tp 4'\nrun \"$A\"", ("run", "--tp 4")),
        ("A=(--tp 4\n  # --pp 8\n  --cp 2 # why\n)\nrun ${A[@]}", ("run", "--tp", "4", "--cp", "2")),
        ('A=("--tp 4" x)\nrun ${A[@]}', ("run", "--tp", "4", "x")),
        ('A=("--tp 4" x)\nrun "${A[@]}"', ("run", "--tp 4", "x")),
        ("A=(a)\nA+=(b c)\nrun ${A[*]} ${A[1]} ${#A[@]}", ("run", "a", "b", "c", "b", "3")),
        ("A=x\nA+=y\nrun $A", ("run", "xy")),
        ("run ${N:-8} ${M-'a b'} ${K:+z}", ("run", "8", "a", "b")),
        ("N=2\nrun ${N:-8} ${N:+z} $((N * 8)) $(( $N + 1 ))", ("run", "2", "z", "16", "3")),
        ("run a \\\n  b \\\n  c", ("run", "a", "b", "c")),
        ("export A=3 B=4\nrun $A$B", ("run", "34")),
        ("A=llama3_8b\nrun ${A^^} ${A%_*} ${A##*_} ${A/llama/x} ${A:0:5}", ("run", "LLAMA3_8B", "llama3", "8b", "x3_8b", "llama")),
        ("if [ 2 -gt 1 ]; then A=1; else A=2; fi\nrun $A", ("run", "1")),
        ("D=fp8\nif [[ \"$D\" == \"bf16\" ]]; then A=1\nelif [[ $D = fp* ]]; then A=2; fi\nrun $A", ("run", "2")),
        ("A=1\nif [ $A -eq 1 ] && [ -n \"$A\" ]; then A=5; fi\nrun $A", ("run", "5")),
        ("M=7b\ncase $M in\n 7b) H=4096 ;;\n 13b|14b) H=5120 ;;\nesac\nrun $H", ("run", "4096")),
        ("M=14b\ncase $M in\n 7b) H=4096 ;;\n 13b|14b) H=5120 ;;\nesac\nrun $H", ("run", "5120")),
        ("f() {\n  run --tp $1\n}\nf 4", ("run", "--tp", "4")),
        ("function f { run --tp $1; }\nf 8", ("run", "--tp", "8")),
        ("C='run --tp 4'\neval $C", ("run", "--tp", "4")),
        ("A=4 run --tp 2 > log.txt 2>&1 &", ("run", "--tp", "2")),
        ("[ 1 -eq 1 ] && A=3\n[ 1 -eq 2 ] && A=4\nrun $A", ("run", "3")),
        ("set -- 4 8\nrun $1 $2", ("run", "4", "8")),
        ("cat <<EOF\nrun --tp 9\nEOF\nrun --tp 4", ("run", "--tp", "4")),
        ("run --a=b --c=\"$D e\"" .replace("$D ", ""), ("run", "--a=b", "--c=e")),
        ("unset A\nA=1\nrun $A", ("run", "1")),
        ("if [ -z \"$DATA\" ]; then echo none; exit 1; fi\nrun 1\nexit 0\nrun 2", ("run", "1")),
        ("exit_early=1\nif [ $exit_early -eq 0 ]; then exit 1; fi\nrun 1", ("run", "1")),
    ],
)  # fmt: skip
def test_expansion(text: str, expected: tuple[str, ...]) -> None:
    assert words_of(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run $SLURM_NNODES", "$SLURM_NNODES"),
        ("run $1", "$1"),
        ("run $(date)", "$(date)"),
        ("run `date`", "$(date)"),
        ("A=$(nproc)\nrun $((A * 2))", "$((A * 2))"),
        (
            "if [ $X = 1 ]; then A=3; fi\nrun $A",
            "A, which line 1 sets under a condition that the file does not tell",
        ),
        ("read A\nrun $A", "$A, which is read from the terminal"),
    ],
)
def test_unknown_values_are_named(text: str, named: str) -> None:
    (word,) = words_of(text)[1:]
    assert not is_known(word)
    assert shown_value(word) == named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=<Specify path and file prefix>_text_document", "<Specify path and file prefix>_text_document"),
        ("A=<PATH>_text_document", "<PATH>_text_document"),
        ("A=<PATH> (e.g., /x)", "<PATH> (e.g., /x)"),
        ("A=/data/<name>-v1.json  # ours", "/data/<name>-v1.json"),
        ("A=<PATH>", "<PATH>"),
        ("A=<path, or name>/x", "<path, or name>/x"),
    ],
)  # fmt: skip
def test_a_place_to_fill_in_is_not_known(text: str, expected: str) -> None:
    script = read_script(f"{text}\nrun --data $A --tp 4")
    assert [words[0] for words, _ in script.commands] == ["run"]
    _, _, value, *rest = words_of(f'{text}\nrun --data "$A" --tp 4')
    assert not is_known(value)
    assert shown_value(value) == expected
    assert rest == ["--tp", "4"]


def test_files_without_blanks_are_no_places_to_fill_in() -> None:
    assert words_of("run <in>out.txt 4") == ("run", "4")


def test_what_is_assumed_is_noted() -> None:
    script = read_script("N=${SLURM_NNODES:-2}\nA=1\nwhile true; do A=$2; done\nrun $N $A")
    assert script.commands[-1][0] == ("run", "2", "1")
    assert script.notes == [
        "$SLURM_NNODES is taken to be unset, so that it is 2",
        "line 3 sets A ($2) under a condition that the file does not tell: not taken",
    ]


def test_batch_lines_set_what_slurm_sets() -> None:
    text = "#SBATCH --nodes=16\n#SBATCH --ntasks-per-node 8\n#SBATCH --gres=gpu:a100:8\nrun $SLURM_NNODES $SLURM_NTASKS $SLURM_GPUS_ON_NODE"
    assert words_of(text)[1:] == ("16", "128", "8")


def test_sourced_files_are_read_or_named() -> None:
    files = {"config.sh": "TP=4"}
    script = read_script("source config.sh\n. other.sh\nrun $TP", files.get)
    assert script.commands[-1][0] == ("run", "4")
    assert list(script.unread) == ["other.sh"]


EVIL = """
A=$(touch {mark})
B=`touch {mark}`
C=${{X:-$(touch {mark})}}
D=$(( $(touch {mark}; echo 1) ))
touch {mark} ; eval "touch {mark}"
f() {{ touch {mark}; }}; f
trap 'touch {mark}' EXIT
run <(touch {mark}) "$(touch {mark})" > {mark}.out
"""


def test_nothing_runs(tmp_path, monkeypatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    monkeypatch.setattr("os.system", lambda *a: pytest.fail("a process was started"))
    read_script(EVIL.format(mark=mark))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["A='x", 'run "x', "A=(1 2", "run ${A", "run $((1", "run `x", "run $'x\\'", "run $[1"]
)
def test_what_has_no_end_is_refused(text: str) -> None:
    with pytest.raises(AutoparError, match="has no end"):
        read_script(text)


def test_endless_scripts_end() -> None:
    with pytest.raises(AutoparError, match="deeper than"):
        read_script("f() { f; }\nf")
    with pytest.raises(AutoparError, match="deeper than"):
        read_script("if true; then " * 200 + "run; " + "fi; " * 200)
    with pytest.raises(AutoparError, match="deeper than"):
        read_script("run " + "${A:-" * 3000 + "}" * 3000)
    with pytest.raises(AutoparError, match="more than"):
        read_script("f() { " + "run; " * 300 + "}\n" + "f\n" * 300)


@given(st.text(alphabet="aA1=$(){}[]\"'`;|&<> \n\\-+#:@", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(AutoparError):
        assert isinstance(read_script(text), Script)


@given(
    st.integers(0, 99),
    st.integers(1, 99),
    st.integers(1, 9),
    st.sampled_from("+ - * / % < > == && ||".split()),
)
@settings(max_examples=60, deadline=None)
def test_arithmetic_is_that_of_bash(a: int, b: int, c: int, operator: str) -> None:
    text = f"({a} {operator} {b}) * {c} + X"
    done = subprocess.run(
        ["bash", "-c", f"X=5; echo $(( {text} ))"], capture_output=True, text=True
    )
    assert arithmetic_value(text, lambda name: {"X": "5"}[name]) == int(done.stdout)


@pytest.mark.parametrize(
    "text", ["", "1 +", "1 / 0", "X", "2 ** 1000", "(" * 99 + "1", "1; rm", "9" * 40]
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotANumber):
        arithmetic_value(text, lambda name: "text")


def test_lines_are_counted() -> None:
    assert [node.line for node in parse("a\n\nb \\\n c\nd")] == [1, 3, 5]


GROWING = {
    "a text": "X=aaaaaaaaaa\n" + "X=$X$X\n" * 60,
    "an array": "A=(1 2 3)\n" + 'A+=("${A[@]}")\n' * 60,
    "lists in braces": "run {1..999}{1..999}{1..999}",
    "a document": "X=aaaaaaaaaa\n" + "cat <<E > f\n$X\nE\nX=$X$X\n" * 60,
}


@pytest.mark.parametrize("name", GROWING)
def test_a_value_that_grows_without_end_is_refused(name: str) -> None:
    with pytest.raises(AutoparError, match="a value of the script has more than 2,000,000"):
        read_script(GROWING[name])


ENDLESS = {
    "itself": 'w=$(cat <<E\nbash w.sh; bash w.sh\nE\n)\necho "$w" > w.sh\nbash w.sh\n',
    "each other": "cat <<E > a.sh\nsh a.sh; sh b.sh\nE\ncat <<E > b.sh\nsh a.sh; sh b.sh\nE\nsh a.sh\n",
    "sed": "cat <<E > a\n" + "x" * 20000 + "\nE\n" + 'sed "s/x/xxxxxxxxxx/g" a > a\n' * 30,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_scripts_that_run_each_other_end(name: str) -> None:
    script = read_script(ENDLESS[name])
    assert len(script.commands) < 50_000
    assert all(len(text) <= 2_000_000 for text in script.files.values())


def test_many_lists_in_braces_are_not_known() -> None:
    assert not is_known(words_of("run " + "{a,b}" * 2000)[1])
