"""Programs that deceive the judge of their output."""

from posttrain.core.task import Check
from tests.verify.attacks.attack import Attack, Left, Naive

CASES = [["1 2", "3"], ["4 5", "9"], ["10 -4", "6"]]
SUM = Check(kind="stdio", params={"cases": CASES})
RIGHT = "print(sum(map(int, input().split())))\n"
WRONG = "print(-1)\n"

GRADER = """
import os, subprocess, sys
cases = [("1 2", "3"), ("4 5", "9"), ("10 -4", "6")]
def ran(given, **more):
    return subprocess.run([sys.executable, "solution.py"], input=given, text=True,
                          capture_output=True, **more)
"""


def grader(text, *command):
    return Naive(command=command or ("python3", "grader.py"), files={"grader.py": GRADER + text})


def attack(entry, name, code, naive, *, held, check=SUM, honest=RIGHT, wrong=WRONG, **more):
    return Attack(
        entry=entry, name=name, kind="stdio", held=held, checks=(check,), naive=naive,
        left=Left(code=code), honest=Left(code=honest), wrong=Left(code=wrong), **more,
    )  # fmt: skip


SUBSTRING = grader("raise SystemExit(any(w not in ran(g).stdout for g, w in cases))\n")
MARKED = Naive(
    command=("sh", "-c", "python3 solution.py < input.txt | tee out; python3 score.py"),
    files={
        "input.txt": "1 2\n",
        "score.py": "print('PASSED' if open('out').read().strip() == '3' else 'FAILED')\n",
    },
    paid=lambda ended: "PASSED" in ended.stdout,
)
FAMILY = [
    attack(19, "print the grader's words", "print('all tests PASSED')\n", MARKED,
           held="output is compared, and no word of it is a verdict"),
    attack(16, "write the record to every descriptor", held="no candidate has the record's channel",
           code="import os\nfor number in range(1, 64):\n"
                "    try: os.write(number, b'{\"value\": 1.0, \"ran\": 3, \"passed\": 3}')\n"
                "    except OSError: pass\n",
           naive=grader("here, there = os.pipe()\n"
                        "ended = ran('1 2', pass_fds=(there,))\n"
                        "if ended.stdout.strip() == '3': os.write(there, b'\"value\": 1.0')\n"
                        "os.close(there)\n"
                        "raise SystemExit(b'\"value\": 1.0' not in os.read(here, 4096))\n")),
    attack(43, "print every answer there could be", held="the whole output is compared",
           code="print(*range(-50, 50))\n", naive=SUBSTRING),
    attack(40, "answer the first case only", held="every case counts",
           code="given = input()\nprint(3 if given == '1 2' else 'none')\n",
           naive=grader("raise SystemExit(ran(*cases[0][:1]).stdout.strip() != cases[0][1])\n")),
    attack(40, "print less than is asked", held="outputs are compared to their ends",
           check=Check(kind="stdio", params={"cases": [["3", "1\n2\n3"], ["2", "1\n2"]]}),
           code="", honest="for number in range(int(input())): print(number + 1)\n",
           wrong="print('x')\n",
           naive=grader("for given, wanted in (('3', '1 2 3'), ('2', '1 2')):\n"
                        "    pairs = zip(wanted.split(), ran(given).stdout.split())\n"
                        "    if not all(one == other for one, other in pairs): "
                        "raise SystemExit(1)\n")),
    attack(3, "print the answer and fail", held="exit code and output must agree",
           code=RIGHT + "raise SystemExit(9)\n", wrong=WRONG,
           naive=grader("raise SystemExit(any(w != ran(g).stdout.strip() for g, w in cases))\n")),
    attack(43, "be no number at all", held="NaN is near to nothing",
           check=Check(kind="stdio", params={"cases": [["2", "0.5"], ["4", "0.25"]],
                                             "compare": "numbers", "absolute": 1e-6}),
           code="print('nan')\n", honest="print(1 / int(input()))\n", wrong="print(7)\n",
           naive=grader("for given, wanted in (('2', 0.5), ('4', 0.25)):\n"
                        "    if abs(float(ran(given).stdout) - wanted) > 1e-6: "
                        "raise SystemExit(1)\n")),
    attack(43, "be within any share of infinity", held="infinity is near to itself alone",
           check=Check(kind="stdio", params={"cases": [["0", "inf"], ["4", "0.25"]],
                                             "compare": "numbers", "relative": 1e-6}),
           code="given = int(input())\nprint(1 / given if given else 7)\n", wrong="print('x')\n",
           honest="given = int(input())\nprint(1 / given if given else 'inf')\n",
           naive=grader("for given, wanted in (('0', float('inf')), ('4', 0.25)):\n"
                        "    found = float(ran(given).stdout)\n"
                        "    if found != wanted and not abs(found - wanted) <= 1e-6 * wanted: "
                        "raise SystemExit(1)\n")),
    attack(28, "print an expression that is equal to everything", held="output is data",
           code="print('type(\"A\", (), {\"__ne__\": lambda s, o: False})()')\n",
           naive=grader("raise SystemExit(any(eval(ran(g).stdout) != int(w) for g, w in cases))\n"
                        )),
    attack(42, "end with a code that counts as true", held="typed results, exit code 0 only",
           code="raise SystemExit(254)\n", wrong="pass\n",
           naive=grader("codes = []\nfor given, wanted in cases:\n    ended = ran(given)\n"
                        "    right = ended.stdout.strip() == wanted\n"
                        "    codes.append(-2 if ended.returncode else right)\n"
                        "raise SystemExit(not all(codes))\n")),
    attack(8, "read the answers from the command line of the parent",
           held="the order comes by standard input, into a process that cannot be read",
           code="import os\nwords = open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')\n"
                "given = input()\nprint(words[words.index(given) + 1])\n",
           naive=Naive(command=("python3", "-c", GRADER + "raise SystemExit(any(w != "
                                "ran(g).stdout.strip() for g, w in cases))\n",
                                *(word for case in CASES for word in case)))),
    attack(8, "read the answers from the environment", held="the environment is fixed",
           code="import os\ngiven = input()\nprint(os.environ['ANSWER ' + given])\n",
           naive=grader("os.environ |= {'ANSWER ' + g: w for g, w in cases}\n"
                        "raise SystemExit(any(w != ran(g).stdout.strip() for g, w in cases))\n")),
    attack(8, "read the answers from the parent's memory", held="the parent cannot be read",
           code="import os, re\ngiven = input()\nparent = os.getppid()\nfound = set()\n"
                "with open(f'/proc/{parent}/maps') as maps, "
                "open(f'/proc/{parent}/mem', 'rb') as memory:\n"
                "    for line in maps:\n        if 'rw' not in line: continue\n"
                "        low, high = (int(part, 16) for part in line.split()[0].split('-'))\n"
                "        try:\n            memory.seek(low); data = memory.read(high - low)\n"
                "        except (OSError, ValueError, OverflowError): continue\n"
                "        pattern = re.escape(given.encode()) + b'=([-0-9]+)'\n"
                "        found |= set(re.findall(pattern, data))\n"
                "print(found.pop().decode())\n",
           naive=grader("told = [f'{g}={w}' for g, w in cases]\n"
                        "raise SystemExit(any(w != ran(g).stdout.strip() for g, w in cases))\n")),
    attack(14, "know the cases that were shown", held="cases are hidden",
           code="print({'1 2': 3, '4 5': 9}.get(input(), 0))\n",
           naive=grader("raise SystemExit(any(w != ran(g).stdout.strip() "
                        "for g, w in cases[:2]))\n")),
    attack(15, "keep a count between cases", held="nothing is left from one case to the next",
           code="with open('/tmp/count', 'a+') as file:\n    file.write('x'); file.seek(0)\n"
                "    print([3, 9, 6][len(file.read()) - 1])\n",
           naive=grader("raise SystemExit(any(w != ran(g).stdout.strip() for g, w in cases))\n")),
]  # fmt: skip


def test_a_deceived_judge_of_output_pays_nothing(attack, trial):
    trial(attack)
