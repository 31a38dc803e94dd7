"""Answer pairs in the formats of the benchmarks, with the verdict that a person gives them.

RIGHT and WRONG have lists of (answer, reference) by kind; CHOICES has whole responses.
"""

from typing import NamedTuple


class Pair(NamedTuple):
    answer: str
    reference: str
    correct: bool
    kind: str


RIGHT = {
    "numbers": [
        ("18", "18"), ("18.0", "18"), ("27", "27.0"), ("1,234", "1234"), ("1450000", "1,450,000"),
        ("025", "25"), ("25", "025"), ("-3", "-3"), ("- 3", "-3"), ("+7", "7"), (".5", "0.5"),
        ("0.50", "0.5"), ("10,\\!080", "10080"), ("10080", "10,\\!080"), ("5.", "5"),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100"), ("58{,}500", "58,500"), ("1e3", "1000"),
        ("1.5\\times 10^{3}", "1500"), ("6.72 \\times 10^{-5}", ".0000672"), ("10^{6}", "1000000"),
        ("4.5e33", "4.5 \\times 10^{33}"), ("10^5", "100000"), ("1.5 million", "1500000"),
        ("0.33333", "\\frac{1}{3}"), ("2.6667", "\\frac{8}{3}"), ("0.6666666667", "2/3"),
        ("3.14159", "\\pi"), ("1.41421", "\\sqrt{2}"), ("$42$", "42"), ("\\(42\\)", "42"),
        ("42.", "42"), ("(42)", "42"), ("1.0000", "1"),
    ],
    "percent": [
        ("10\\%", "10\\%"), ("10\\%", "0.1"), ("0.1", "10\\%"), ("10", "10\\%"), ("10\\%", "10"),
        ("15.38%", "15.38\\%"), ("25 percent", "25\\%"), ("25\\%", "\\frac{1}{4}"),
        ("12.5\\%", "\\frac18"),
    ],
    "fractions": [
        ("\\frac{1}{2}", "0.5"), ("1/2", "\\frac{1}{2}"), ("\\dfrac{3}{6}", "\\frac12"),
        ("\\frac 59", "\\frac{5}{9}"), ("\\frac9{19}", "9/19"),
        ("-\\frac{35}{9}", "\\frac{-35}{9}"),
        ("\\frac{35}{-9}", "-\\frac{35}{9}"), ("1\\frac{4}{5}", "\\frac{9}{5}"),
        ("137 \\frac{1}{2}", "137.5"), ("1 4/5", "1.8"), ("\\frac{\\frac{1}{2}}{3}", "1/6"),
        ("\\tfrac{14}{3}", "14/3"), ("\\frac{2}{4}", "\\frac{1}{2}"), ("\\frac{3}{1}", "3"),
        ("\\frac{11+9a}{20}", "\\frac{9a+11}{20}"), ("3:4", "\\frac{3}{4}"), ("½", "0.5"),
    ],
    "radicals": [
        ("2\\sqrt{3}", "\\sqrt{12}"), ("\\sqrt3", "\\sqrt{3}"), ("11\\sqrt2", "11\\sqrt{2}"),
        ("\\frac{1}{\\sqrt{3}}", "\\frac{\\sqrt{3}}{3}"), ("70 \\sqrt{2}", "70\\sqrt2"),
        ("5(√3 + 1)", "5\\sqrt{3}+5"), ("\\sqrt[3]{-8}", "-2"), ("\\sqrt[3]{54}", "3\\sqrt[3]{2}"),
        ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}"), ("2^{1/2}", "\\sqrt{2}"),
        ("\\sqrt{\\frac{1}{2}}", "\\frac{\\sqrt2}{2}"), ("11 + 11\\sqrt{5}", "11 \\sqrt{5} + 11"),
    ],
    "constants": [
        ("288\\pi", "288 \\pi"), ("\\frac{\\pi}{3}", "\\pi/3"), ("18+2π", "18+2\\pi"),
        ("\\frac{20000}{\\pi}", "20000/\\pi"), ("2\\ln 2", "\\ln 4"), ("\\log_2 8", "3"),
        ("e^{2}-1", "\\mathrm{e}^2-1"), ("2^{2024}", "4^{1012}"), ("5!", "120"),
        ("\\binom{10}{3}", "120"), ("\\cos\\frac{\\pi}{3}", "\\frac12"), ("\\infty", "+\\infty"),
        ("2^{-3}", "\\frac{1}{8}"), ("\\frac{2023!}{2022!}", "2023"), ("\\lg 100", "2"),
    ],
    "complex": [
        ("6-5i", "6 - 5i"), ("-5i+6", "6 - 5i"), ("1-\\mathrm{i}", "1 - i"),
        ("(1+2i)^2", "-3+4i"), ("\\frac{1}{i}", "-i"), ("1+274i", "1 + 274 i"),
    ],
    "polynomials": [
        ("x^2+2x+1", "(x+1)^2"), ("(a+5)(b+2)", "(b+2)(a+5)"), ("ab+2a+5b+10", "(a+5)(b+2)"),
        ("2k + 2", "2(k+1)"), ("8n^2 + 4n + 1", "1+4n+8n^{2}"), ("p-q", "-q+p"),
        ("x^5 - x^4 + x^3 - x^2 + x - 1", "(x-1)(x^4+x^2+1)"), ("3R^2", "3R^{2}"),
        ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"), ("2x^{2}", "2x^2"),
    ],
    "functions": [
        ("\\cot x", "\\frac{1}{\\tan x}"), ("\\sin^2 x", "1-\\cos^2 x"), ("\\tan(x)", "\\tan x"),
        ("2\\sin x\\cos x", "\\sin 2x"), ("e^{x+1}", "e\\cdot e^x"), ("\\ln x^2", "2\\ln x"),
        ("4 \\cdot(-3)^{n-1}", "4(-3)^{n-1}"), ("|x-1|", "|1-x|"), ("f(x)+1", "1+f(x)"),
        ("|a|^2", "a^2"), ("\\frac{d}{2}", "0.5d"), ("e", "\\mathrm{e}"), ("2e", "e+e"),
        ("\\frac{15}{4} \\cdot\\left(\\frac{5}{3}\\right)^{n}", "\\frac{15}{4}(5/3)^n"),
    ],
    "tuples": [
        ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("(1,2)", "(1, 2)"),
        ("(0.5,-13)", "\\left(\\frac{1}{2}, -13\\right)"), ("(6,31,-1)", "( 6, 31, -1)"),
        ("（1，2）", "(1,2)"), ("(-\\frac{1}{2}, -0.5)", "(-0.5,-\\frac12)"),
        ("(1,-16,-4,43)", "(1,-16,-4,43)"),
        ("(x,y)=(4,0)", "(4,0)"),
    ],
    "intervals": [
        ("[0,1)", "[0,1)"), ("(3,4]", "\\left(3,4\\right]"), ("(-\\infty,0]", "(-\\infty, 0]"),
        ("x \\in [-2,7]", "[-2,7]"), ("[-2,7]", "x \\in [-2,7]"), ("-2 \\le x \\le 7", "[-2,7]"),
        ("x>2", "(2,\\infty)"), ("(2,+\\infty)", "(2,\\infty)"), ("n \\geq 3", "n\\ge3"),
        ("(0,9)\\cup(9,36)", "(9,36) \\cup (0,9)"),
        ("(-\\sqrt3,\\sqrt{3})", "(-3^{1/2}, \\sqrt{3})"),
        ("x<2 \\text{ or } x>3", "(-\\infty, 2) \\cup (3, \\infty)"), ("2<x", "x>2"),
        ("c<a<b", "b>a>c"), ("{x \\mid -3<x<4}", "(-3,4)"),
        ("\\left[ \\frac{\\pi^2}{8}, \\frac{5 \\pi^2}{4} \\right]", "[\\pi^2/8, 5\\pi^2/4]"),
    ],
    "sets and lists": [
        ("\\{1,2,3\\}", "\\{3,2,1\\}"), ("1,2,3", "3,2,1"), ("3, 5, 7", "3,5,7"),
        ("{1,2,3,4}", "\\{1, 2, 3, 4\\}"), ("-2 and 1", "-2,1"), ("x=1 \\text{ or } x=-2", "1,-2"),
        ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"), ("\\pm 2", "2,-2"),
        ("\\{1+\\sqrt5, -2, 1-\\sqrt{5}\\}", "\\{1\\pm\\sqrt{5},-2\\}"), ("(1)(3)(4)", "①③④"),
        ("(1,2),(3,4)", "(3,4), (1,2)"), ("\\emptyset", "∅"), ("24，112", "24,112 "),
        ("1或2", "1,2"), ("A=\\frac{\\pi}{6}, 2", "\\frac{\\pi}{6}, 2"), ("1、3", "1,3"),
    ],
    "matrices": [
        (
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        ),
        (
            "\\begin{bmatrix}-2\\\\-14\\\\-7\\end{bmatrix}",
            "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        ),
        (
            "\\begin{pmatrix}-\\frac13\\\\\\frac23\\end{pmatrix}",
            "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
        ),
        (
            "\\begin{pmatrix} 0.2 \\\\ -3.6 \\end{pmatrix}",
            "\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}",
        ),
        (
            "\\left[\\begin{array}{cc}1&0\\\\0&1\\end{array}\\right]",
            "\\begin{bmatrix}1&0\\\\0&1\\end{bmatrix}",
        ),
    ],
    "equations": [
        ("x=5", "x = 5"), ("5", "x=5"), ("x=5", "5"), ("y = 2x+3", "y=3+2x"), ("2x+3", "y=2x+3"),
        ("2x-y+3=0", "y = 2x + 3"), ("10x-14y+22z+8=0", "5x - 7y + 11z + 4 = 0"),
        ("x^2+2y^2=4", "\\frac{x^{2}}{4}+\\frac{y^{2}}{2}=1"), ("x = \\frac{10}{4} = 2.5", "2.5"),
        ("y^{2}=2 x+1, a=\\frac{3}{4}", "y^2=2x+1,a=0.75"), ("f(x)=x^2-1", "(x-1)(x+1)"),
        ("a_{n}=4 \\cdot(-3)^{n-1}", "a_n=4(-3)^{n-1}"), ("\\theta = 30^\\circ", "30"),
        ("(\\mathrm{e}-1)x-y-1=0", "y=(e-1)x-1"),
    ],
    "units": [
        ("5 \\text{ cm}", "5"), ("5", "5 \\text{ cm}"), ("15\\mbox{ cm}^2", "15"), ("5 cm", "5"),
        ("864", "864 \\mbox{ inches}^2"), ("90^\\circ", "90"), ("90°", "90^\\circ"),
        ("90 degrees", "90^{\\circ}"), ("\\frac{270}{7}", "\\frac{270}7\\text{ degrees}"),
        ("5.4", "5.4 \\text{ cents}"), ("\\$18.90", "18.9"), ("18.90", "\\$18.90"), ("$36", "36"),
        ("\\$32,\\!348", "32348"), ("32348 dollars", "32348"), ("Rs. 750", "750"),
        ("7 apples", "7"),
        ("126km", "126"), ("12 km/h", "12"), ("60 miles per hour", "60"), ("10 square feet", "10"),
        ("5\\mathrm{~m/s}", "5"), ("10\\,\\mathrm{m}^2", "10"), ("8 people left", "8"),
    ],
    "chinese": [
        ("12元", "12"), ("１２", "12"), ("3个", "3"), ("答案：42", "42"), ("答案是42。", "42"),
        ("５．５厘米", "5.5"), ("8平方米", "8"), ("60千米/小时", "60"), ("3万", "30000"),
        ("25％", "25\\%"),
        ("必要不充分条件", "必要不充分条件"), ("充要条件。", "充要条件"), ("20", "20本"),
        ("ｘ＝３", "3"), ("６种", "6"), ("\\text{12元}", "12"), ("￥15", "15"),
    ],
    "bases": [("2516_{8}", "2516_8"), ("2516", "2516_8"), ("4210_5", "4210_{5}")],
    "words": [
        ("\\text{Evelyn}", "Evelyn"), ("evelyn", "\\text{Evelyn}"), ("\\text{east}.", "east"),
        ("Yes", "yes"), ("even", "\\text{even}"), ("(C)", "\\text{(C)}"), ("C", "\\text{(C)}"),
        ("\\text{C}", "C"), ("2:30", "2:30"), ("\\mathrm{ellipse}", "\\text{ellipse}"),
    ],
}  # fmt: skip

WRONG = {
    "numbers": [
        ("19", "18"), ("70001", "70000"), ("1450001", "1,450,000"), ("0.333", "1/3"), ("3", "-3"),
        ("0.51", "0.5"), ("500", "5"), ("0.05", "5"), ("1234", "1,234,567"), ("1 2", "12"),
        ("3.14", "\\pi"), ("1e4", "1000"), ("10^{5}", "1000000"), ("", "5"), ("5.001", "5"),
        ("\\frac{22}{7}", "\\pi"), ("\\frac{355}{113}", "\\pi"), ("15", "0.15"),
    ],
    "percent": [("10\\%", "0.01"), ("10\\%", "1000"), ("0.1\\%", "10\\%"), ("11\\%", "10\\%")],
    "fractions": [
        ("\\frac{1}{3}", "\\frac{1}{2}"), ("2/1", "\\frac12"), ("1\\frac{3}{5}", "\\frac{9}{5}"),
        ("\\frac{35}{9}", "-\\frac{35}{9}"), ("4:3", "3/4"),
    ],
    "radicals": [
        ("3\\sqrt{2}", "\\sqrt{12}"), ("\\sqrt{52}", "\\sqrt{51}"), ("\\sqrt{x^2}", "x"),
        ("-2\\sqrt{3}", "2\\sqrt3"), ("2\\sqrt{13}", "3\\sqrt{13}"),
    ],
    "constants": [
        ("2^{2024}-1", "2^{2024}"), ("9.42", "3\\pi"), ("289\\pi", "288 \\pi"), ("288", "288\\pi"),
        ("\\ln 3", "\\ln 2"), ("-\\infty", "\\infty"), ("2023!", "2022!"),
    ],
    "complex": [("6+5i", "6 - 5i"), ("5-6i", "6-5i"), ("6", "6-5i")],
    "polynomials": [
        ("x^2+1", "(x+1)^2"), ("(a+5)(b+3)", "(a+5)(b+2)"), ("q-p", "p-q"), ("3x", "3"),
        ("3", "3x"),
        ("3x", "3y"), ("2k", "2k+2"),
    ],
    "functions": [("\\tan x", "\\cot x"), ("\\sin 2x", "\\sin x"), ("4(-3)^{n}", "4(-3)^{n-1}")],
    "tuples": [
        ("(2,1)", "(1,2)"), ("(1,2,3)", "(1,2)"), ("(3,\\pi)", "(3,\\frac{\\pi}{2})"),
        ("1", "(1,2)"),
        ("1,2", "(1,2)"),
    ],
    "intervals": [
        ("(0,1)", "[0,1)"), ("[0,1]", "[0,1)"), ("[0,2)", "[0,1)"), ("x \\ge 2", "(2,\\infty)"),
        ("(0,9)", "(0,9) \\cup (9,36)"), ("n > 3", "n\\ge3"), ("x<2", "x>2"), ("b>c>a", "b>a>c"),
        ("(-\\infty,2)", "(2,\\infty)"),
    ],
    "sets and lists": [
        ("1,2", "1,2,3"), ("1,2,4", "1,2,3"), ("1,1,2", "1,2,2"),
        ("1+\\sqrt{19}", "1\\pm\\sqrt{19}"),
        ("(3)", "(1)(3)"), ("(2)(6)", "(3)(4)"), ("1", "1,-2"), ("\\{1\\}", "\\emptyset"),
        ("23,112", "24,112"),
    ],
    "matrices": [
        ("\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ],
    "equations": [
        ("x=6", "x=5"), ("y=5", "x=5"), ("y=2x+4", "y=2x+3"), ("2x+3=0", "y=2x+3"),
        ("x^2+y^2=4", "\\frac{x^2}{4}+\\frac{y^2}{2}=1"), ("-2x", "y=2x"), ("0=0", "x=1"),
    ],
    "units": [
        ("6 \\text{ cm}", "5"), ("18.91 dollars", "\\$18.50"), ("8 apples", "7"),
        ("91^\\circ", "90"),
    ],
    "chinese": [("13元", "12"), ("充要条件", "必要不充分条件"), ("3万", "3000"), ("１３", "12")],
    "bases": [("11_2", "3"), ("2517_8", "2516_8"), ("2516_9", "2516_8")],
    "words": [
        ("seat", "\\text{east}"), ("Navin", "\\text{Evelyn}"), ("odd", "\\text{even}"),
        ("D", "\\text{(C)}"),
        ("1:15", "2:30"), ("no", "yes"),
    ],
}  # fmt: skip

FIVE = {"kind": "choice", "letters": "ABCDE"}
FOUR = {"kind": "choice", "letters": "ABCD"}
OPTIONS = {**FIVE, "choices": ["A)5(√3 + 1)", "B)$65", "C)20%", "D)4,000", "E)None of these"]}
CHOICES = [  # response, reference, whether it is right, row
    (r"\boxed{C}", "C", True, FIVE), (r"\boxed{(C)}", "C", True, FIVE),
    (r"\boxed{C.}", "C", True, FIVE),
    (r"\boxed{\text{C}}", "C", True, FIVE), (r"\boxed{\text{(C)}}", "C", True, FIVE),
    (r"\boxed{\textbf{(C) } 12}", "C", True, FIVE), (r"\boxed{C. 1-\mathrm{i}}", "C", True, FOUR),
    (r"\boxed{c}", "C", True, FIVE), (r"\boxed{D}", "C", False, FIVE),
    (r"\boxed{\text{A or }C}", "C", False, FIVE),
    ("So the answer is C.", "C", True, FIVE), ("The answer is (C) 12.", "C", True, FIVE),
    ("**Answer: C**", "C", True, FIVE), ("The correct option is C", "C", True, FIVE),
    ("A is wrong. B is wrong. So C", "C", True, FIVE), ("A is too small, so B", "A", False, FIVE),
    ("It is B. A car cannot do this.", "B", True, FIVE),
    ("The answer is D. A and B are too small.", "D", True, FIVE),
    ("答案是C", "C", True, FOUR), ("答案：C", "C", True, FOUR), ("故选C。", "C", True, FOUR),
    ("选 B", "B", True, FOUR),
    ("故选：ACD.", "ACD", True, FOUR), (r"\boxed{ACD}", "ACD", True, FOUR),
    (r"\boxed{A,C}", "ACD", False, FOUR),
    (r"\boxed{A, C, D}", "ACD", True, FOUR), (r"所以答案为 $\boxed{\text{B}}$", "B", True, FOUR),
    (r"\boxed{5\sqrt{3}+5}", "A", True, OPTIONS), (r"\boxed{65}", "B", True, OPTIONS),
    (r"\boxed{20\%}", "C", True, OPTIONS),
    (r"\boxed{4000}", "D", True, OPTIONS), (r"\boxed{\text{None of these}}", "E", True, OPTIONS),
    (r"\boxed{4001}", "D", False, OPTIONS), (r"\boxed{E}", "D", False, OPTIONS),
    ("no idea", "C", False, FIVE),
    (r"\boxed{E}", "E", True, FIVE), ("so E", "E", False, FOUR), (r"\boxed{B}", "(B)", True, FIVE),
    (r"\boxed{C}", "C. {x \\mid-3<x<4}", True, FOUR), (r"\boxed{B}", "65", True, OPTIONS),
    ("", "A", False, FIVE),
    (r"First \boxed{A}, but really \boxed{B}", "B", True, FIVE), (r"\boxed{}", "A", False, FIVE),
]  # fmt: skip

PAIRS = [
    Pair(answer, reference, correct, kind)
    for correct, kinds in ((True, RIGHT), (False, WRONG))
    for kind, pairs in kinds.items()
    for answer, reference in pairs
]
