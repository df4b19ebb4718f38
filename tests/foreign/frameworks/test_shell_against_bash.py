"""What the reader of launch scripts claims is what bash does with them, in scripts drawn from the
constructs that launch scripts use.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import bash_runs
from support.bash_runs import disagreement
from support.effort import examples

GRAMMAR = {
    "S": ["A", "B", "NAME"],
    "L": ["L", "ARGS"],
    "D": ["0", "1", "2", "3", "8", "12", "20"],
    "BARE": "4 8 0 12 bf16 llama-7b data/x.json x.y.z true --x=".split(),
    "TEXT": ["<BARE>", '"<BARE>"', '"--tp 4 --pp 2"', '"a b"', '""'],
    "GLOB": "*-* -* *. l*a [0-9] ? b /* */ 7b [!a]* *".split(),
    "OLD": ["b", "4", "-", "7b", ".", "a"],
    "NEW": ["4", "x", "", "_"],
    "CHANGE": [
        *(f"{op}<ELSE>" for op in (":-", "-", ":+", "+", ":=")),
        *(f"{op}<GLOB>" for op in ("#", "##", "%", "%%")),
        *(f"{op}<OLD>/<NEW>" for op in ("/", "//", "/#", "/%")),
        *(":1", ":0:2", ": -2", ":2:3", ":1:-1", ":5", ":$N:2", "^^", ",,", "^", ""),
    ],
    "ELSE": ["<BARE>", "$<S>", '"<BARE>"'],
    "AT": "[@] [*] [0] [1] [-1] [@]:1 [@]:0:1 [$N] [@]%b [@]:-x".split(),
    "X": ["$<S>", "${<S><CHANGE>}", "${#<S>}", "${<L><AT>}", "${#<L>[@]}", "<ARG>"],
    "ARG": "$1 $2 ${1:-4} ${2:-bf16} ${3-8} $# $@ ${@:2} $* ${1%%b*} ${!R}".split(),
    "SUM": ["<TERM>", "<TERM> <OP> <TERM>", "(<TERM> <OP> <TERM>) <OP> <TERM>",
            "(<TERM> > 3 ? <TERM> : <TERM>) <OP> <TERM>", "((<TERM> + <TERM>) * <TERM>) <OP> 2"],
    "TERM": ["<D>", "N", "M", "$N", "${M}", "010", "0x1F", "K"],
    "OP": "+ - * / % ** < > == != && || <= << & | ^ ,".split(),
    "COMMAND": ["$(nproc)", "$(basename <QX>)", "$(dirname <QX>)", "$(echo <X>)",
                "$(expr <D> + 2)", "$(seq <D>)", "`echo <D> | tr 1 2`"],
    "QX": ['"<X>"'],
    "WORD": ["<X>", "<QX>", "<X><BARE>", "<BARE><X>", "<QX><X>", '"--x=<X>"', "<TEXT>", "<COMMAND>",
             "$((<SUM>))", "a{1,2}", "{1..3}<X>", "'$A'", "\\$A", "\"a'b\"", "~/x", r"$'a\tb'",
             "$[<SUM>]", '$"<BARE>"', r"$'a\'b'", r"`echo \`echo <D>\``",
             "\"${<S>:-'<BARE> x'}\"", "\"${<S>:+'<BARE>'}\"", '"${<S>:-"<BARE> x"}"'],
    "TEST": [
        "[ -z <QX> ]", "[ -n <QX> ]", "[ <QX> = <TEXT> ]", "[ <QX> != <TEXT> ]", "test -n <QX>",
        "! test -z <QX>", "! [ <QX> == <QX> ]", "[ <QX> ]", "[ <QX> = 4 -o <QX> = 8 ]",
        "[[ <X> == <GLOB> ]]", "[[ <X> != <TEXT> ]]", "[[ <X> == <QX> ]]", "[[ <X> == <GLOB><QX> ]]",
        "[[ -z <X> && <QX> == <TEXT> ]]", "[[ -n <X> || ! <QX> == 4 ]]", "[[ <X> =~ ^[0-9]+$ ]]",
        "[[ <X> =~ ^(4|8)$ ]]", "[ $N -<CMP> <D> ]", '[ "$#" -<CMP> <D> ]', "[[ $M -<CMP> $N ]]",
        "((<SUM>))", "[ <QX> = 4 ] && [ -n <QX> ]", "[ <QX> = 4 ] || [[ -n <X> ]]",
        "[ -f <QX> ]", "[ $(nproc) -gt <D> ]", '[ -z "$(nproc)" ]',
    ],
    "CMP": "eq ne lt le gt ge".split(),
    "BODY": ["<STEP>", "<STEP>\n<STEP>", "<LINE>"],
    "STEP": [
        "<S>=<WORD>", "export <S>=<TEXT>", "<S>+=<WORD>", "<L>=(<WORD> <WORD>)", "<L>+=(<WORD>)",
        "<L>=()", "<L>[<D>]=<WORD>", "N=$((<SUM>))", "M=$((<SUM>))", "((N++))", "((N += 2))",
        'let "N -= 1, M = 3"', "torchrun <WORD> <WORD>", ": ${<S>:=<BARE>}", "unset <S>",
        "<S>=9 torchrun $<S> $A", "R=<S>", "set -- 8 'a b'", "set --", 'set -- "$@" z', "shift",
        'read A B <<< "<BARE> b c"', "<S>=<WORD> <S>=3", 'CMD="torchrun $A $B"; $CMD',
        "CMD=\"torchrun $A '$B'\"; eval $CMD", "printf -v <S> '%s' q",
        "<S>=$(cat <<EOF\n--x <X> y\nEOF\n)", "<S>=$(cat <<'EOF'\n--x $A y\nEOF\n)",
        "cat > conf <<EOF\nx: $A\nEOF", "<TEST> && <S>=<WORD>", "<TEST> || <S>=<WORD>",
    ],
    "LINE": [
        "if <TEST>; then\n<BODY>\nfi", "if <TEST>; then\n<BODY>\nelse\n<BODY>\nfi",
        "if <TEST>; then\n<BODY>\nelif <TEST>; then\n<BODY>\nfi",
        "case <X> in\n<GLOB>|<BARE>)\n<BODY>\n;;\n\"<BARE>\") <STEP>;;\n*) <S>=else ;; esac",
        "case <QX> in <GLOB>) <STEP>;; <GLOB><QX>) <STEP>;; esac",
        "for i in <LIST>; do <ROUND>; done", "for i; do <S>+=$i; done",
        "while [ $# -gt 0 ]; do\ncase \"$1\" in\n--tp) A=\"$2\"; shift 2 || shift $#;;\n"
        "--sp) B=on; shift;;\n*) ARGS+=(\"$1\"); shift;;\nesac\ndone",
        "f() {\n<DEFINED>\n}\n<CALL>", "function f {\n<BODY>\n}\n<CALL>", "(\n<BODY>\n)",
        "{\n<BODY>\n}", "for ((i = 0; i < 3; i++)); do N=$i; done",
        "{\n<BODY>\n} 2>/dev/null", "for i in <LIST>; do <ROUND>; done < run.sh > log",
        "{ <STEP>; } | cat", "{ <TEST>; } && { <STEP>; } || { <STEP>; }",
        "( <BODY>\n) || <S>=no", "torchrun --a <(echo <X>) <WORD>",
        "for ((A=0, B=1; A<2; A++)); do <STEP>\ndone",
        "i=0\nwhile [ $i -lt 3 ]; do A=$A$i; i=$((i + 1)); done",
        "while true; do A=loop; break; done", "until [ -n \"$A\" ]; do A=set; done",
        "torchrun $A | tee log", "torchrun $A > log 2>&1 &\nwait", "exec torchrun $A",
        "cd . && torchrun $A", "echo $A | torchrun x", "A=1; exit 0", "false || A=f",
        "true && A=t", "set -euo pipefail", "A=$B && torchrun $A", "command torchrun 1",
        "time torchrun 2", "IFS=,", "if torchrun $A; then B=ok; fi", "( A=1; exit 0 )",
    ],
    "LIST": ['"$@"', "1 2 3", "4", "{1..3}", '"${L[@]}"', "$A", "$(seq 2)", "a b", "*", "<WORD>"],
    "ROUND": ['<S>="$<S> $i"', 'ARGS+=("$i")', "N=$((N + i))", "torchrun $i",
              '[ "$i" = 2 ] && break; B=$i', '[ "$i" = 2 ] && continue; B=$i'],
    "DEFINED": ['local <S>=$1; torchrun $<S> "$2"', "<S>=$1", '[ -z "$1" ] && return; N=$1',
                "local <S>; <S>=$1; A=$<S>", "local <S>; A=x$<S>", 'torchrun $# "$@"',
                "if [ $# -gt 1 ]; then B=many; return 1; fi; B=few", "<BODY>"],
    "CALL": ["f", "f <WORD>", "f 4 <WORD>", "f 1 || A=no", "f 1 2 && A=yes", "if f 2; then B=ok; fi"],
}  # fmt: skip
"""What may stand for a symbol, which is written `<S>`."""
STARTS = ("N=2\nM=3\nR=A\n", "N=2\nM=3\nA=llama-7b\nB='a b'\nL=(4 'a b' bf16)\nR=A\n")
END = 'torchrun "--A=$A" "--B=$B" "--NAME=$NAME" $N "$M" "$#" "${L[@]}" "${ARGS[@]}" "$@"'
ARGUMENTS = ("4", "8", "--tp", "--pp", "x y", "llama", "--sp", "")
SYMBOL = re.compile(r"<([A-Z]+)>")


@st.composite
def drawn(draw: st.DrawFn, symbol: str, depth: int = 0) -> str:
    """A text for a symbol."""
    deep = "STEP" if symbol == "BODY" and depth > 3 else symbol
    text = draw(st.sampled_from(GRAMMAR[deep]))
    return SYMBOL.sub(lambda found: draw(drawn(found[1], depth + 1)), text)


@st.composite
def scripts(draw: st.DrawFn) -> str:
    lines = draw(st.lists(st.one_of(drawn("STEP"), drawn("LINE")), min_size=1, max_size=4))
    return draw(st.sampled_from(STARTS)) + "\n".join([*lines, END, ""])


def check(text: str, args: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert not disagreement(text, args, Path(folder)), text


any_script = given(scripts(), st.lists(st.sampled_from(ARGUMENTS), max_size=3))


@any_script
@settings(max_examples=examples(80, 200), suppress_health_check=list(HealthCheck))
def test_what_is_claimed_is_what_bash_does(text: str, args: list[str]) -> None:
    check(text, args)


@pytest.mark.slow
@any_script
@settings(max_examples=6000, suppress_health_check=list(HealthCheck))
def test_what_is_claimed_is_what_bash_does_at_length(text: str, args: list[str]) -> None:
    check(text, args)


@pytest.mark.parametrize(
    "text",
    [
        'if [ -n "${#A}" ]; then B=4; fi\n',
        '[ "$A" = 4 ] && [ -n "${#A}" ] && A=8\n',
        '[ "$A" = 4 ] && true || B=8\n',
        'if [ "$A" = 4 ]; then shift; fi\nset -- "$@" z\n',
        'if ((N + K)); then while [ $# -gt 0 ]; do case "$1" in 4) shift;; *) B=$1; shift;; esac; done; fi\n',
        'case $A in *-*|4) B=$A;; "4") set -- 8 b;; esac\nA=${1:-4}\n',
    ],
)
def test_what_the_file_does_not_tell_stays_unknown(text: str, tmp_path: Path) -> None:
    for args in ([], ["4", "x"]):
        assert not disagreement(STARTS[0] + text + END, args, tmp_path)


QUOTED = [
    r"A=$'a\'b'; torchrun $'a\'b' \"$A\" $'\x41\101\u0042\e\cB\?\"\q' \"$'a'\" ''",
    'torchrun $"abc" a$"b c" "$" "a$" $',
    'N=2\ntorchrun $[N*2] "$[ (N + 1) * 2 ]" x$[3]y',
    """M=3; torchrun "${Q:-'x y'}" "${Q:-"x y"}" "${Q:+'a'}" "${N-'$M'}" "${Q:-a$'b'}" "${Q:-\\}}" """,
    """Q=4; torchrun "${Q:+'a  b'}" "--x=${Q:+"'"}" "${K:='k k'}" "$K" """,
    'A=${Q:-\'x  y\'}; torchrun "$A" ${Q:-{x}} "${Q:-{x}}"',
    'torchrun "$(cat <<E\n\\" \\\\ \\$A \\a ${Q:-"x"} ${Q:-\'y\'}\nE\n)"',
    'A=$(cat <<E\n{\\"a\\": "b"}\nE\n)\ntorchrun "$A"',
]
"""Launches whose words need no more than the quotes of the script."""
NESTED = [
    r"torchrun `echo \`echo x\`` \"`echo \"a\"`\" 1",
    "torchrun $(echo 'a\\') 2",
    "torchrun $(echo a # it's )\n) 3",
    'torchrun $(case x in x) echo y;; esac) "$(case x in (x) echo "y" ;; esac)" 4',
    'torchrun "$(cat <<E | tr a b\nit\'s )\nE\n)" 5',
    'torchrun "$(echo "a)" \'b"c\')" $( (echo a); (echo b) ) 6',
    "A=$((echo a); (echo b))\ntorchrun $A $((1 + (2))) 7",
    'torchrun "${Q:-$(echo "}")}" ${Q:-`echo }`} 8',
    "A='a}b'\ntorchrun ${A%'}b'} ${A/\"}\"/c} ${A//\\}/d} 9",
    "B=7b A=x\nA=llama-7b\nB=7b\ntorchrun ${A%$B} ${A/$B/x} ${A/#llama/$B} 10",
]
"""Launches with expansions that hold quotes, brackets and comments of their own."""

REDIRECTED = [
    "while read x; do torchrun $x; done < run.sh\ntorchrun 1",
    "A=1\n{ torchrun 2; } 2>/dev/null\n! false && A=3\ntorchrun $A",
    "{ torchrun 2; } > log 2>&1 | cat\ntorchrun 3",
    "if true; then torchrun 1; fi >> log 2>&1 &\nwait\ntorchrun 2",
    "f() { torchrun $1; } 2> log\nf 4 > log\n( torchrun 5 ) &> log\ntorchrun 6",
    "while read A; do :; done <<EOF\n1 2\nEOF\ntorchrun 6",
    "case 4 in 4) torchrun 3;; esac > log\nfor i in 1; do torchrun $i; done < <(echo x)\ntorchrun 4",
    "{ true; } || exit 1\n( false ) || A=4\n( [ 4 = 4 ] ) && torchrun $A",
    "A=1\n{ A=2; exit 3; } | cat\ntorchrun $A\n{ false; } && exit 2\ntorchrun 5",
    "( : ${A:=4} ) || A=no\ntorchrun --x=$A\nA=1\n( A=2; [ $A = 2 ] ) && torchrun 1",
    "[ 4 = 8 ] && { A=1; } || { A=2; }\ntorchrun $A",
    "A=1\n{ A=2; } && { A=3; } || { A=4; }\ntorchrun $A",
    "torchrun --a <(echo x y) --b 1 > >(cat) --c",
    "A=(<(echo x) 4)\ntorchrun --a=<(echo $(echo x) ')') \"${A[1]}\" >(cat) 5 < <(echo y) 6",
    'for ((i=0;i<2;i++)); do torchrun $i; done\ntorchrun "$let" 8',
    "i=5 j=3 k=4\nfor((i = 0, j+=2; i < 2; k -= 1, ++i)) ; do torchrun $i $j $k; done\ntorchrun $i $j $k",
    "let=4\nfor let in 1 2; do torchrun $let; done",
]
"""Launches in blocks with redirections, with files that are commands, and in loops that count."""


@pytest.mark.parametrize("text", REDIRECTED)
def test_blocks_are_those_of_bash(text: str, tmp_path: Path) -> None:
    runs = bash_runs.bash_runs(text, (), tmp_path)
    assert runs
    assert not disagreement(text, (), tmp_path)
    names = {words[0] for words, _ in bash_runs.read_script(text, args=()).commands}
    assert names <= {"torchrun", "echo", "cat", "wait", "true", "false", "!", ":", "["}
    assert (
        "let"
        not in bash_runs.read_script(
            text.replace("let=4", "").replace("for let", "for l")
        ).variables
    )


def known_runs(text: str) -> list[tuple[str, ...]]:
    return bash_runs.reader_runs(bash_runs.read_script(text, args=()))


@pytest.mark.parametrize("text", QUOTED)
def test_quotes_mean_what_they_mean_to_bash(text: str, tmp_path: Path) -> None:
    assert known_runs(text) == bash_runs.bash_runs(text, (), tmp_path)


@pytest.mark.parametrize("text", NESTED)
def test_expansions_end_where_they_end_for_bash(text: str, tmp_path: Path) -> None:
    assert bash_runs.bash_runs(text, (), tmp_path)
    assert not disagreement(text, (), tmp_path)
    assert known_runs(text)[0][-1].isdigit()


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("A=8\ntorchrun $A", "A=4\ntorchrun $A"),
        ("torchrun 4\ntorchrun 8", "torchrun 8"),
        ("torchrun '4 8'", "torchrun 4 8"),
        ("torchrun --pp $PP 4", "torchrun --tp $PP 4"),
    ],
)
def test_a_wrong_claim_is_noticed(text: str, other: str, tmp_path: Path, monkeypatch) -> None:
    assert not disagreement(text, (), tmp_path)
    read = bash_runs.read_script
    monkeypatch.setattr(bash_runs, "read_script", lambda _, **given: read(other, **given))
    assert disagreement(text, (), tmp_path)
