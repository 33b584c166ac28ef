"""A domain of one's own, in one file: name a multiple of a number that lies in a range.

Many answers are right, so it brings its own verification: a small program that looks at the reply.
Use it by its path:

    posttrain domains check examples/my_domain.py:MULTIPLES

    [[domains.train]]
    name = "examples/my_domain.py:MULTIPLES"
"""

from __future__ import annotations

from posttrain.core import seeds
from posttrain.core.task import Oracle, Task
from posttrain.domains.domain import answer_oracle, answer_task, program

CHECKER = '''
def check(order):
    """1.0 where the reply is one whole number that divides and lies in the range."""
    words = order.reply.replace("Answer:", "").split()
    if len(words) != 1 or not words[0].isdecimal() or len(words[0]) > 9:
        return 0.0
    number, wanted = int(words[0]), order.params
    inside = wanted["low"] <= number <= wanted["high"]
    return float(inside and number % wanted["divisor"] == 0)
'''


class Multiples:
    """Levels make the divisor larger."""

    name = "my.multiples"
    levels = 3

    def task(self, seed: int, level: int) -> Task:
        """The question of a seed: the same seed gives the same question, always."""
        chance = seeds.stream(self.name, level, seed)
        divisor = chance.randint(3, (9, 19, 99)[level])
        low = chance.randint(10, 500)
        high = low + divisor + chance.randint(0, 5)
        return answer_task(
            f"Name a multiple of {divisor} from {low} to {high}.",
            domain=self.name,
            seed=seed,
            level=level,
            answer=str(high - high % divisor),
            check=program(CHECKER, params={"divisor": divisor, "low": low, "high": high}),
        )

    def oracle(self, task: Task) -> Oracle:
        """One right answer; it must earn reward 1."""
        return answer_oracle(task)


MULTIPLES = Multiples()
