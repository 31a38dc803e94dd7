"""Lists the procedural data sets of reasoning-gym, or shows options and problems of some.

    python -m launch.problems
    python -m launch.problems chain_sum
    python -m launch.problems chain_sum:max_terms=3:max_digits=1 gcd --count=3

An argument is an entry of config.data.reasoning_gym, with or without options. Descriptions are the
package's own. docs/data.md has the rest. Exit codes: 0 done, 2 an unknown data set or option, or
the package is not installed (one line names it).
"""

import textwrap

from absl import flags

from launch import cli
from semrl_jax.data import procedural

COUNT = flags.DEFINE_integer("count", 1, "problems to show", lower_bound=0, upper_bound=1000)
WIDTH = 100


def main(entries: list[str]) -> int:
    described = {each.name: each for each in procedural.data_sets()}
    if not entries:
        width = max(map(len, described))
        group_width = max(len(each.group) for each in described.values())
        for each in described.values():
            line = f"{each.name:<{width}}  {each.group:<{group_width}}  {each.description}"
            print(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}...")
        print(f"\n{len(described)} data sets; {procedural.COMMAND} NAME shows the options of one")
        return 0
    for source in procedural.sources(entries):
        found = procedural.options(source)
        each = described[source.dataset]
        print(": ".join(filter(None, (f"{each.name} ({each.group})", each.description))))
        for name, (value, default) in found.items():
            changed = f"  (default {default})" if value != default else ""
            print(f"  {name}={value}{changed}")
        for problem in procedural.examples(source, COUNT.value):
            print("problem:")
            print(textwrap.indent(problem.question, "  "))
            print(f"answer: {problem.answer or 'none is given, the scorer checks'}")
        print()
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__, names=True)
