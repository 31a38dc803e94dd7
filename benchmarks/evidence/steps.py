"""A judge of the columns of the quickstart's sums: 0 for a right one, -1 for a wrong one."""

import re

COLUMN = re.compile(r"(\d)([+-])(\d)[+-](\d)=(\d)(\d)[,;]")


def columns(response: str, reference: str) -> dict:
    """The reward of the response is for another verifier; carries follow what is written."""
    steps, carry = [], 0
    for column in COLUMN.finditer(response):
        x, y, written, tens, digit = (int(column[i]) for i in (1, 3, 4, 5, 6))
        total = x + y + carry if column[2] == "+" else x - y - carry
        right = (written, tens, digit) == (carry, abs(total // 10), total % 10)
        steps.append((column.end(), 0.0 if right else -1.0))
        carry = tens
    return {"score": 0.0, "correct": f"\\boxed{{{reference}}}" in response, "steps": steps}
