"""Launch scripts have the values that bash gives them, and unknown values are listed."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from meshwright.planner.foreign.job import Asked
from meshwright.planner.foreign.reading import read_foreign
from meshwright.planner.foreign.shell import read_script
from meshwright.ranks.errors import ConfigError

SCRIPTS = (
    # Branches: the arm of the first true condition, in all of its spellings.
    "M=5\nif [[ ${M} == 7 ]]; then A=1\nelif [[ ${M} == 5 ]]; then A=3\nelif [[ $M == 9 ]]; then A=4\nelse A=5\nfi",
    "M=7\nif [ $M -eq 7 ]; then\n A=1\nelif [ $M -eq 8 ]; then\n A=2\nelse\n A=3\nfi",
    "M=9\nif [ $M = 7 ]; then A=1; elif [ $M = 8 ]; then A=2; else A=3; fi",
    "B=3\nif [ $B == 1 ]; then A=1\nelif [ $B == 2 ]\nthen\nA=2\nelif [ $B == 3 ]\nthen A=3\nfi",
    "B=2\nif [ $B -eq 1 ]; then\n if [ $B -eq 2 ]; then\n A=1\n else\n A=2\n fi\nelif [ $B -eq 2 ]; then\n A=4\nfi",
    "M=1\n[[ $M == 1 ]] && A=2",
    "A=1\nM=0\n[ $M -eq 1 ] || A=2",
    'M=1\nA=x\n[ "$M" = 1 ] && A="$A --flag 3"',
    "B=4\n((B > 3)) && A=1 || A=2",
    "B=1\n{ [ $B = 2 ] && A=3; } || A=4",
    "M=1\nif test $M -eq 1; then A=2; else A=3; fi",
    "M=1\nif ! [ $M -eq 1 ]; then A=2; else A=3; fi",
    "M=1\nif [ ! $M -eq 1 ]; then A=2; else A=3; fi",
    "M=llama3_70b\nif [[ $M == *70b* ]]; then A=2; else A=3; fi",
    'M=llama3_70b\nif [[ $M == "*70b*" ]]; then A=2; else A=3; fi',
    "M=llama3_70b\nif [[ $M =~ 70b$ ]]; then A=2; else A=3; fi",
    "M=1\nN=2\nif [ $M -eq 1 -a $N -eq 2 ]; then A=2; else A=3; fi",
    "M=1\nN=2\nif [ $M -eq 1 ] && [ $N -eq 3 ]; then A=2; else A=3; fi",
    "B=4\nif [[ $B -gt 3 && ( $B -lt 2 || $B -eq 4 ) ]]; then A=1; else A=2; fi",
    "B=true\nif $B; then A=1; else A=2; fi",
    "B=0\nif ((B)); then A=1; else A=2; fi",
    'B=x\nif [ "$B" ]; then A=1; else A=2; fi',
    'if [ "${A:-0}" -eq 0 ]; then A=8; fi',
    'if [[ "${MISSING}" == "" ]]; then A=8; fi\n[ "$A" != "" ] && A="$A"9',
    'B=x7b\ncase "$B" in\n *7b) A=1\n ;;\n *) A=2\n ;;\nesac',
    # Expansions.
    "M=1\nA=0${M:+5}",
    "A=0${M:+5}",
    "M=/a/b/c.json\nA=${M##*/}-${M%.json}-${M%%/b*}-${M#/a}",
    "M=a-b-c\nA=${M//-/_}${M/-/+}${M/%c/d}",
    "M=70B\nA=${M%B}${M::-1}${M:1:1}",
    "M=Llama\nA=${M^^}${M,,}${M,}",
    "C=3\nA=${B:-${C:-4}}",
    ": ${A:=7}",
    "A=3\nB=A\nA=${!B}1",
    "B=(a b c)\nA=${B[1]}${#B[@]}${B[-1]}",
    "declare -A D=([x]=5 [y]=6)\nD[z]=7\nA=${D[y]}${D[z]}",
    "B=abc\nA=${#B}",
    "A='5'\"6\"7\\8",
    "B=6\nA=$(expr $B \\* 2)`expr $B + 2`",
    'B=6\nA=$(echo "$B * 2" | bc)$(basename /x/y.sh .sh)$(dirname /x/y.sh)',
    "A=10\nA+=5",
    "A=4 # not 5\nB='# 6'",
    # Numbers.
    "A=$((7 % 4))$((2 ** 5))$[1+1]",
    "B=3\nA=$((B > 2 ? 5 : 6))",
    "B=6\nlet A=B*2\nlet 'A += 1'",
    "A=0\n((A++))\n((A+=2))",
    "B=16; A=$(( (B + 7) / 8 - 1 ))",
    "B=-7; A=$((B / 2)),$((B % 4)),$((7 / -2)),$((7 % -4)),$((B / -2))",
    "A=3\nfor i in 1 2 3 4 5 6 7 8 9; do A=$((A * A)); done\nA=$A,$((2 ** 63)),$((-1 << 63))",
    # Loops, functions, and texts that are commands.
    'A=1\nfor i in 1 2 3; do A="$A $i"; done',
    "A=1\nfor ((i=0; i<4; i++)); do\n A=$((A * 2))\n if [ $A -gt 6 ]; then break; fi\ndone",
    "A=1\nwhile [ $A -lt 5 ]; do A=$((A+1)); done",
    "A=1\nuntil [ $A -ge 5 ]; do A=$((A+1)); done",
    'for ARGUMENT in "$@"; do A=1; done\nB=2\nA=${A:-$B}',
    'function f {\n A=$1$2\n}\nA=1\nf 5 "6 7"',
    "f() { local B=$1; A=$B; }\nf 7",
    "set -- 3 4\nA=$2$#",
    'B=5\neval "A=\\$B"',
    "f() { A=$B$C; C=6; }\nB=0 C=3\nB=1 C=2 f\nA=$A$B$C",
    "A=1 B=0\nA=2 true\nB=3 eval 'A=$A$B'\nA=$A$B",
    "readonly A=5",
    "cat <<EOF > /dev/null\nA=2\nEOF\nA=${A:-7}",
    "X=(1 # don't\n 2)\nA=${X[@]}",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_values_of_bash(script: str) -> None:
    bash = subprocess.run(["bash", "-c", f'{script}\necho "$A"'], capture_output=True, text=True, check=True).stdout
    assert value_in(script) == " ".join(bash.split())


def value_in(script: str) -> str:
    """Return A at the end of a script, as the script's command gets it."""
    words = read_script(f'{script}\ntrain --value "$A" --end').words
    return " ".join(" ".join(words).removeprefix("train --value").removesuffix("--end").split())


def drawn(draw: random.Random, depth: int) -> str:
    """Draw commands with known values."""
    name, other, count = draw.choice("AB"), draw.choice("AB"), draw.randrange(9)
    conditions = (
        f"[ ${name} -eq {count} ]", f'[[ "${name}" == {count} ]]', f"[[ ${name} -gt {count} || ${other} -lt 3 ]]",
        f"(( {name} + {other} > {count} ))", f"! [ ${{{name}}} -le {count} ]", f"test ${name} -ne {count}",
    )  # fmt: skip
    if depth == 0 or draw.random() < 0.3:
        return draw.choice((
            f"{name}={count}", f"{name}=$(( ({other} + {count}) % 9 ))", f"(( {name} = {other} * 2 % 9 ))",
            f"{name}=${{{other}:-3}}", f"{draw.choice(conditions)} && {name}={count}",
            f"{draw.choice(conditions)} || {name}={count}",
        ))  # fmt: skip
    first, second, third = (drawn(draw, depth - 1) for _ in range(3))
    return draw.choice((
        f"{first}\n{second}\n{third}",
        f"if {draw.choice(conditions)}; then {first}; elif {draw.choice(conditions)}; then\n{second}\nelse {third}\nfi",
        f"if {draw.choice(conditions)}\nthen\n{first}\nelif {draw.choice(conditions)}\nthen {second}\nfi\n{third}",
        f"case ${name} in\n1|{count}) {first};;\n[2-4]) {second}\n;;\n*) {third};; esac",
        f"for i in 1 2; do {first}; {name}=$(( ({name} + i) % 9 )); done",
        f"f{depth}() {{ {first}; {name}=$1; }}\nf{depth} ${other}\n{second}",
    ))  # fmt: skip


def test_drawn_scripts_have_the_values_of_bash() -> None:
    draw = random.Random(7)
    scripts = [f"A=1\nB=2\n{drawn(draw, 3)}\nA=$A,$B" for _ in range(300)]
    every = "\n".join(f"(\n{script}\necho $A\n)" for script in scripts)
    bash = subprocess.run(["bash"], input=every, capture_output=True, text=True, check=True).stdout.split()
    assert [value_in(script) for script in scripts] == bash
    assert len(set(bash)) > 30


def test_what_an_unknown_value_decides_is_listed() -> None:
    """Both branches are read, also of `&&` and of a loop's condition."""
    script = read_script("[ $Z -eq 1 ] && A=2\nwhile grep x file; do B=1; done\ntrain --a $A --b $B --c $C")
    assert script.flags == {"a": "2", "b": "1", "c": "$C"}
    assert script.undecided == ["[ $Z -eq 1 ]", "grep x file"]
    chain = read_script("if [ $Z = 1 ]; then A=1; elif [ 1 = 1 ]; then A=2; else A=3; fi\ntrain --a $A")
    assert (chain.flags, chain.undecided) == ({"a": "2"}, ["[ $Z = 1 ]"])
    assert read_script("if [ $Z = 1 ]; then echo a; else exit; fi\ntrain --a 1").undecided == []
    assert read_script("A=$((Z * 2))\ntrain --a $A").flags == {"a": "$((Z * 2))"}


def test_no_script_is_read_without_end() -> None:
    for script in ("while true; do A=$A$A$A; A+=x; done", "f() { f; f; }\nf", "A='$A'\neval eval echo $A", "((((", "'"):
        read_script(script)
    assert read_script("while true; do case $1 in a) A=1;; esac; shift; done\ntrain --a 1").flags == {"a": "1"}


@pytest.mark.parametrize("deep", ["(" * 50_000, "$(" * 50_000, "if " * 50_000, f"A={'${A:-' * 50_000}"])
def test_a_script_that_nests_too_deep_is_told(deep: str, tmp_path: Path) -> None:
    (tmp_path / "deep.sh").write_text(f"{deep}\ntrain --num-layers 2 --hidden-size 8\n")
    with pytest.raises(ConfigError, match="nests more"):
        read_foreign(tmp_path / "deep.sh", Asked())


def test_scripts_and_templates_beside_a_script_are_read(tmp_path: Path) -> None:
    """Sourced ones, those started by sbatch with Slurm's variables, and JSON made by sed."""
    for name, text in {
        "run.sh": "PP=2\nTP=$((8 / PP))\n. `pwd`/config.sh\nsource $HOME/.bashrc\nsbatch --nodes=4 conf/job.sh 7\n",
        "config.sh": 'export PARAMS="--tp $TP --pp $PP"\n',
        "conf/job.sh": '#SBATCH --ntasks-per-node=8\nZ=3\nsed "s/STAGE/$Z/" T.json | sed "s/ON/true/g" > ds.json\n'
        'CMD="train $PARAMS --nodes $SLURM_NNODES --tasks $SLURM_NTASKS_PER_NODE --last $1"\nsrun -l sh -c "${CMD}"\n',
        "T.json": '{"stage": STAGE, "on": ON,\n"also": ON}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script = read_script((tmp_path / "run.sh").read_text(), tmp_path)
    assert script.flags == {"tp": "4", "pp": "2", "nodes": "4", "tasks": "8", "last": "7"}
    assert script.files == {"ds.json": '{"stage": 3, "on": true,\n"also": true}\n'}
    again = read_script("bash run.sh\nsed -i 's/3/1/' ds.json\ncat ../secret > x\n", tmp_path / "conf")
    assert (again.flags, again.files) == ({}, {})
    (tmp_path / "run.sh").write_text("bash run.sh; bash run.sh\ntrain --a 1\n")
    assert read_script("./run.sh", tmp_path).flags == {"a": "1"}


def test_a_script_with_arguments_is_read_from_a_line_beside_it(tmp_path: Path) -> None:
    sizes = "--num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --global-batch-size 8 --bf16"
    (tmp_path / "run.sh").write_text(f"N=$1\nH=${{2}}\ntrain --num-layers $N --hidden-size $H {sizes}\n")
    with pytest.raises(ConfigError, match="argument of the script"):
        read_foreign(tmp_path / "run.sh", Asked())
    (tmp_path / "go.sh").write_text("cd /work\nsh run.sh \\\n2 \\\n64\n")
    model = read_foreign(tmp_path / "go.sh", Asked()).run["model"]
    assert (model["layers"], model["hidden"]) == (2, 64)


def test_flags_of_a_launcher_are_not_the_programs() -> None:
    script = read_script("uv run mason.py --cluster a --gpus 8 -- torchrun --nnodes=2 dpo.py --lr 1")
    assert script.flags == {"nnodes": "2", "lr": "1"}


def test_a_command_writes_files() -> None:
    script = read_script('N=2\necho \'{"a": 1}\' > x.json\ncat <<E | tee out/y.json\n{"b": $N}\nE\ntrain --a 1\n')
    assert script.files == {"x.json": '{"a": 1}\n', "y.json": '{"b": 2}\n'}
