"""Each rule of docs/rewards.md: answers that it pays, and near misses that it must not pay."""

import pytest

from troll_trl.rewards import verify

# Name: gold answer, right answers, wrong answers
RULES = {
    "1 text": [
        (r"\frac{1}{2}", [r"$\dfrac12$", r"\left.\frac{1}{2}\right.", r"\displaystyle\tfrac{1}{2}"], []),
        ("12", ["12.", r"\textbf{12}", r"\(12\)"], ["1 2", "21"]),
        ("F", [r"\mathcal{F}"], ["G"]),
        (r"\lfloor x \rfloor", ["⌊x⌋"], [r"\lceil x\rceil", "x"]),
    ],
    "2 choices": [
        ("C", ["(C)", r"\text{(C)}", "C. 12", "option C", "(C) I and III only"], ["D", "C or D", "(C)(D)", "A, C"]),
        (r"\text{(B)}", ["B", "(B) $-3$", r"\textbf{(B)}\ 12"], ["(B), 98765", "not (B)", "12"]),
    ],
    "3 numbers": [
        ("1234", ["1,234", "1{,}234", r"1\,234", "1234.0", "1.234e3", r"1.234\times10^3"], ["1,243", "12,34"]),
        (r"\frac{3}{4}", ["0.75", "3/4", ".75", "6/8", r"75\%"], ["0.7", "4/3", "3, 4"]),
        (r"\frac{7}{4}", [r"1\frac34", "1 3/4", "1.75"], [r"1\frac43", "13/4"]),
        (r"\frac13", [r"0.\overline{3}", "2/6"], ["0.33", "0.333333"]),
        (r"50\%", ["50", "0.5", "50 percent", r"\frac12"], ["5", "0.05", "500"]),
        ("1000", ["10^3", "1 thousand"], ["10^2", "3^{10}"]),
        ("1 million", ["1000000", "10^6", "1,000,000"], ["1", "1 billion"]),
        ("17_8", ["(17)_8", "17"], ["17_9", "15"]),
        ("17", ["17_{10}"], ["17_8"]),
        ("-5", ["\u22125", "- 5", "-{5}"], ["5", "-{-5}"]),
    ],
    "4 a number must be worked out": [
        ("9025", ["9025"], ["95^2", r"95\cdot95", "9024+1", r"\sqrt{81450625}", r"\binom{9025}{1}"]),
        ("5", ["5.0"], ["10/2", r"\frac{10}{2}", r"10\div2", r"\frac{5}{1}", r"|-5|"]),
    ],
    "5 units": [
        ("12", ["12 apples", r"12\text{ cm}", r"\$12", "12 red apples", "12, in total", "12 hours a day"], []),
        ("12", [], ["12 dozen", "12 squared", "12 million", "12 probably", r"12\text{ doubled}", "12 or 13", "12x"]),
        (r"10\text{ kPa}", ["10", "10 kPa"], [r"10\text{ Pa}", r"10\text{ kg}"]),
        ("5 days", ["5 day"], ["5 decades", "120 hours"]),
        (r"5\text{ cm}^2", ["5 square centimeters", "5"], [r"5\text{ cm}^3", r"5\text{ cm}"]),
        ("5 miles east", ["5 miles", "5 mi east"], ["5 miles west"]),
    ],
    "6 parts": [
        ("1, 2", ["2, 1", r"\{1,2\}", "1 and 2", "x=2 or x=1"], ["1", "1, 2, 3", "1, 1", "1, 3"]),
        (r"\frac{639}{40}", [r"15\frac{39}{40}, \frac{639}{40}", "639/40 or 15.975"], ["639/40 or 15.9"]),
        (r"\pm 3", ["3, -3", "-3, 3"], ["3", "-3"]),
        (r"1\pm\sqrt2", [r"1+\sqrt2, 1-\sqrt2"], [r"1+\sqrt2", r"1+\sqrt2, 1-\sqrt3"]),
        ("(1, 2)", [r"\left(1,2\right)", "x=1, y=2", r"\begin{pmatrix}1\\2\end{pmatrix}"], ["(2,1)", "1 or 2"]),
        ("[1, 2)", [r"1\le x<2"], ["[1,2]", "(1,2)", "1<x<2"]),
        (r"(-\infty,1)\cup(2,3]", [r"(2,3]\cup(-\infty,1)"], [r"(-\infty,1]\cup(2,3]", "(2,3]"]),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"], ["1,2,3,4"]),
        ("x=1, y=2", ["1, 2", "y=2, x=1"], ["2, 1", "x=2, y=1"]),
        (r"(3,\frac{\pi}{2})", [r"(r,\theta)=(3,\pi/2)"], [r"(3,-\frac{\pi}{2})"]),
    ],
    "7 words": [
        (r"\text{Evelyn}", ["Evelyn", r"\textbf{evelyn}"], ["Evelyn or Bob", "Evelny", "not Evelyn"]),
        (r"\text{odd}", ["Odd"], ["even"]),
    ],
    "8 names": [
        ("5", ["x = 5", "f(2) = 5", "m+n = 5", r"\angle ABC = 5", "|S| = 5", r"\text{The answer is }5", "2+3 = 5"], []),
        ("5", ["There are 5"], ["2x = 5", "AB^2 = 5", "a-b = 5", "xy = 5", "|x| = 5", "twice n is 5", "5 = 5"]),
        ("34", ["The number of ways is 34"], ["The square of n is 34", "One of the roots is 34"]),
    ],
    "9 equations": [
        ("y = 2x+3", ["y=3+2x", "2x-y+3=0", "2x+3"], ["y=2x", "y = 3x+2", "2x+3=0"]),
        ("x = 5", ["5", "x=5"], ["y=5", "2x = 10"]),
        ("b = c/a", [r"b=\frac{c}{a}"], ["ab = c"]),
        ("x+y=5", ["y+x=5"], ["5"]),
    ],
    "10 roundings": [
        (r"\frac{25}{3}", [r"\frac{25}{3} \approx 8.33"], [r"8.33 \approx \frac{25}{3}", r"\approx 8.33"]),
    ],
    "11 expressions": [
        (r"2\sqrt{3}", [r"\sqrt{12}", r"2 \cdot 3^{1/2}"], [r"\sqrt3+\sqrt3", "3.4641", r"2\sqrt2"]),
        (r"\frac{\sqrt{3}}{2}", [r"\sqrt{\frac34}"], [r"\sin 60^\circ"]),
    ],
    "12 math-verify": [
        ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2", "f(x)=(1+x)^2"], ["x^2+2x", "(x+2)^2"]),
        ("3+4i", ["4i+3"], ["3-4i", "3+4j"]),
        ("log2(x)", [r"\log_2 x", r"\log_{2}(x)"], [r"\log_3 x", r"\ln x"]),
        ("asin(x)", [r"\arcsin x"], [r"\sin x"]),
        ("abs(x-1)", ["|x-1|", r"\left|1-x\right|"], ["x-1"]),
        (r"\frac{a}{b}", [r"a\div b", "a÷b"], [r"b\div a"]),
        (r"\gcd(m,n)", [r"\gcd(m, n)"], ["1", r"\gcd(m,k)"]),
        ("A^TB", ["A^T B"], ["AB^T", "B A^T"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("cases", RULES.values(), ids=RULES)
def test_rule(cases):
    asked = [
        (gold, answer, paid)
        for gold, right, wrong in cases
        for paid, answers in ((1.0, right), (0.0, wrong))
        for answer in answers
    ]
    verdicts = verify([gold for gold, _, _ in asked], [rf"So $\boxed{{{answer}}}$." for _, answer, _ in asked])
    assert [case for case, verdict in zip(asked, verdicts, strict=True) if verdict.reward != case[2]] == []


NOT_READ = [("2 km", "2000 m"), ("4:30 p.m.", "16:30"), ("12,5", "12.5"), (r"y=x^2+C", "y=x^2+K")]
NOT_READ += [(r"(-\infty,2)\cup(2,\infty)", r"\text{all real numbers except }2"), (r"\emptyset", "no solution")]


def test_what_the_page_says_is_not_read_gets_nothing():
    golds, answers = zip(*NOT_READ, strict=True)
    verdicts = verify(golds * 2, [rf"\boxed{{{answer}}}" for answer in answers + golds])
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(golds) + [1.0] * len(golds)


def test_a_choice_in_a_sentence_after_the_box():
    texts = [r"\boxed{12}. The answer is (B).", r"\boxed{12} and \boxed{B}", r"\boxed{12}"]
    texts.append(r"\boxed{D or B}. The answer is (A) or (B).")
    assert [verdict.reward for verdict in verify(["B"] * 4, texts)] == [1.0, 1.0, 0.0, 0.0]
