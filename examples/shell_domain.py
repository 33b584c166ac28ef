"""A shell domain of one's own: write a script that counts lines, and leave it in the workspace.

The attempt's sandbox is sealed, and the checker runs the script it left in another one, over lines
that the policy never saw; so a script that prints one right number earns nothing.

    posttrain domains check examples/shell_domain.py:COUNTING
"""

from __future__ import annotations

from posttrain.core import seeds
from posttrain.core.task import Artefact, ArtefactKind, Environment, Oracle, Task
from posttrain.domains.domain import program, shell_oracle, shell_task

CHECKER = '''
def check(order):
    """1.0 where the script prints the right number in every case."""
    for lines, wanted in order.params["cases"]:
        ran = order.run(["bash", order.artefacts + "/count.sh"], stdin=lines.encode())
        if ran.stdout.split() != [str(wanted).encode()]:
            return 0.0
    return 1.0
'''
WORDS = ("apple", "river", "stone", "cloud", "maple", "tiger", "lemon", "piano", "ocean", "amber")


class Counting:
    """Level 0 counts the lines with a word, level 1 those without it."""

    name = "my.counting"
    levels = 2

    def task(self, seed: int, level: int) -> Task:
        """The word of a seed, and the cases its script is tried on."""
        chance = seeds.stream(self.name, level, seed)
        word = f"{chance.choice(WORDS)}{chance.randint(10, 99)}"
        cases = []
        for length in (5, 8, 13):
            lines = [chance.choice((word, *WORDS)) for _ in range(length)] + [word]
            wanted = (lines.count(word), len(lines) - lines.count(word))[level]
            cases.append(["".join(f"{line}\n" for line in lines), wanted])
        flags, how = (("-c", "contain"), ("-vc", "do not contain"))[level]
        return shell_task(
            f"Write count.sh: it reads lines and prints how many of them {how} {word}.",
            domain=self.name,
            seed=seed,
            level=level,
            environment=Environment(),
            checks=(program(CHECKER, params={"cases": cases}),),
            artefacts=(Artefact(name="script", kind=ArtefactKind.FILE, path="count.sh"),),
            commands=(f"echo grep {flags} {word} > count.sh",),
        )

    def oracle(self, task: Task) -> Oracle:
        """The command that writes such a script."""
        return shell_oracle(task)


COUNTING = Counting()
