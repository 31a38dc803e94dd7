"""Checks a finished quickstart against the figures in the README."""

import json
import pathlib
import sys


def main() -> None:
    workdir = pathlib.Path(sys.argv[1])
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    accuracy = "eval/arithmetic/greedy_accuracy"
    first, last = rows[0], rows[-1]
    print(f"greedy accuracy {first[accuracy]:.3f} -> {last[accuracy]:.3f}")
    assert 0.2 <= first[accuracy] <= 0.6, "the warm start left the band of 20 to 60 %"
    assert last[accuracy] >= first[accuracy] + 0.3, "the gain is under 30 points"
    assert first["eval/arithmetic/num_problems"] == 512
    assert first["eval/arithmetic/boxed_fraction"] >= 0.9
    assert first["eval/arithmetic/finished_fraction"] >= 0.9
    for row in rows[10:-1]:
        assert row["shaping/valid_fraction/mean"] >= 0.9, row["step"]
        if row["reward/zero_variance_group_fraction"] < 1:
            assert row["shaping/bonus/mean"] > 0, row["step"]
    assert (workdir / "curves.png").exists() and (workdir / "report.html").exists()
    print("quickstart holds")


if __name__ == "__main__":
    main()
