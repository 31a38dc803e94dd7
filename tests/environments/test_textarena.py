"""Games of textarena: deterministic, and played to their end."""

import random
import re
import sys

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.interface import FIRST_ROLES, as_messages, as_turn
from semrl_jax.environments.kinds import textarena as kind
from semrl_jax.environments.kinds.textarena import MOVES, ONE_PLAYER, Environment
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.environments.test_pool import played as pooled
from tests.environments.test_pool import section

TASK = {"number": 1}
RANDOM = {game: Environment(f"{game}-v0", opponent="random") for game in MOVES}
ODD = (
    "", "[", "]", "[]", "[x]", "[1]", "[0 1]", "[1 1 1]", "[1, 2, 3]", "[-1]", "[²]", "[٣]",
    "[9 9 9]", "[up]", "[A C]", "[A1]", "[1 1 up]", "[guess 1]", "[hit]", "[draw]", "[accept]",
    "[red]", "[5 + 3]", "[col 99]", "[reveal 1 1]", "[" * 1000, "[" + "9" * 5000 + "]",
    "\x00\ud800", "é" * 9999,
)  # fmt: skip


GAMES = [
    pytest.param(game, marks=pytest.mark.slow if game in ("RushHour", "Sokoban") else ())
    for game in (*ONE_PLAYER, *MOVES)
]


def played(environment, messages, seed):
    """The prompt and all answers of an episode."""
    found = [environment.reset(TASK, seed)]
    for message in messages:
        found.append(environment.step(message))
        if found[-1].done:
            break
    return found


def moves_of(environment):
    """A legal move of a game for two, drawn at random."""
    state = environment._state
    return random.choice(MOVES[environment._family](state.game_state))


@pytest.mark.parametrize("game", GAMES)
def test_a_game_follows_from_its_seed_whatever_was_played(game):
    make = lambda: RANDOM.get(game) or Environment(f"{game}-v0")  # noqa: E731
    messages = random.Random(0).choices(ODD, k=4)
    used = make()
    expected = played(used, messages, seed=7)
    for seed in range(3):
        played(used, messages, seed)
    random.random()
    assert played(used, messages, seed=7) == played(make(), messages, seed=7) == expected
    assert expected[0] and all(turn.done or isinstance(turn.messages, str) for turn in expected[1:])


@pytest.mark.parametrize("game", GAMES)
def test_no_message_breaks_a_game(game):
    environment = RANDOM.get(game) or Environment(f"{game}-v0")
    draws = random.Random(game)
    for seed in range(5):
        turns = played(environment, draws.choices(ODD, k=30), seed)[1:]
        for turn in turns:
            assert isinstance(turn.reward, float | int) and (turn.done or turn.messages)


@pytest.mark.slow
def test_two_processes_play_the_same_game():
    environment, messages = RANDOM["KuhnPoker"], ("[check]", "[call]")
    with EnvironmentPool(section("textarena:game=KuhnPoker-v0:opponent=random")) as environments:
        openings = environments.openings(seed=3, count=12)
        assert [each.task for each in openings] == environment.tasks(seed=3, count=12)
        answers = [pooled(environments, opening, *messages) for opening in openings]
    for (task, seed, prompt, _), there in zip(openings, answers):
        assert not any(answer.error for answer in there)
        random.seed(seed)
        assert prompt == as_messages(environment.reset(task, seed), FIRST_ROLES, 10**6)
        assert [as_turn(environment.step(text), 10**6) for text in messages] == [
            answer.turn for answer in there
        ]
    assert len({str(answer.turn) for there in answers for answer in there}) > 2


def test_a_number_is_guessed():
    environment = Environment("GuessTheNumber-v0", max_number=60)
    assert "between 1 and 60" in environment.reset(TASK, seed=1)
    low, high = 1, 60
    for _ in range(7):
        guess = (low + high) // 2
        turn = environment.step(str(guess))
        if turn.done:
            break
        assert ("higher" in turn.messages) != ("lower" in turn.messages)
        low, high = (guess + 1, high) if "higher" in turn.messages else (low, guess - 1)
    assert turn == Turn((), 1.0, True)


def test_of_several_boards_the_last_is_shown():
    environment = Environment("TicTacToe-v0")
    environment.reset(TASK, seed=0)
    answer = environment.step("[4]").messages
    assert answer.count("Current Board") == 1 and "| O |" in answer and answer.count("[4]") == 1
    assert answer.startswith("You are Player 1 in Tic Tac Toe")


@pytest.mark.parametrize(
    ("game", "moves", "reward"),
    [
        ("TicTacToe-v0", "0 3 1 4 2", [1, -2, 2, -2, 1]),
        ("TicTacToe-v0", "8 0 7 1 3 2", [-1, 2, -2, 2, -2, 1]),
        ("TicTacToe-v0", "0 1 2 4 3 5 7 6 8", [0] * 9),
        ("TicTacToe-v0", "0 0", [1, -1]),
        ("TicTacToe-v0", "9", [-1]),
        ("TicTacToe-v0", "no", [-1]),
        ("ConnectFour-v0", "0 1 0 1 0 1 0", [1, -2, 2, -2, 2, -2, 1]),
        ("Nim-v0", "0,3 1,4 2,5", [1, -2, 1]),
        ("Nim-v0", "0,4", [-1]),
    ],
)
def test_both_sides_are_rewarded_for_their_own_turns(game, moves, reward):
    environment = Environment(game)
    environment.reset(TASK, seed=0)
    *before, end = (environment.step(move.replace(",", " ")) for move in moves.split())
    assert [(turn.reward, turn.done) for turn in before] == [(0.0, False)] * len(before)
    assert end == Turn((), reward, True)


@pytest.mark.parametrize("game", MOVES)
def test_a_random_opponent_plays_legal_moves_on_either_side(game):
    environment, outcomes, sides = RANDOM[game], set(), set()
    for seed in range(60):
        random.seed(seed)
        environment.reset(TASK, seed)
        side, state = environment._side, environment._state
        sides.add(side)
        while not (turn := environment.step(moves_of(environment))).done:
            assert state.current_player_id == side
        outcomes.add(turn.reward)
        assert not any(info["invalid_move"] for info in state.game_info.values())
        assert turn.reward == state.rewards[side]
    assert {-1, 1} <= outcomes <= {-1, 0, 1} and sides == {0, 1}
    environment.reset(TASK, seed=0)
    assert environment.step("nonsense") == Turn((), -1, True)


def test_a_policy_that_plays_its_opponent_is_trained_on_the_first_side():
    environment = Environment("TicTacToe-v0", opponent="policy")
    for moves, reward in (("0 3 1 4 2", 1), ("8 0 7 1 3 2", -1), ("0 0", 1)):
        environment.reset(TASK, seed=0)
        *before, end = (environment.step(move) for move in moves.split())
        assert [turn.is_own for turn in before] == [bool(k % 2) for k in range(len(before))]
        assert end == Turn((), reward, True) and not environment.is_self_play


def test_the_opponent_of_a_group_moves_alike():
    """All responses to a prompt meet the same opponent."""
    environment = RANDOM["ConnectFour"]
    found = [played(environment, ["3", "3", "2", "2"], seed=11) for _ in range(2)]
    assert found[0] == found[1] and "Player" in found[0][1].messages


def test_cards_of_the_other_side_are_not_shown():
    environment = RANDOM["KuhnPoker"]
    for seed in range(20):
        texts = [environment.reset(TASK, seed)]
        own = environment._state.game_state["player_cards"][environment._side]
        cards = set(re.findall(r"Your card is: '(\w)'", texts[0]))
        assert cards == {"JQK"[own]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("game=TicTacTo-v0", "no game .*; did you mean TicTacToe-v0.* one of 2048-v0, Bandit"),
        ("game=TwentyQuestions-v0", "'TwentyQuestions-v0' is no game .* without a network"),
        ("game=Wordle-v0", "'Wordle-v0' is no game"),
        (
            "game=TicTacToe-v0:opponent=best",
            "opponent='best' must be random or policy, in one of Conn",
        ),
        (
            "game=2048-v0:opponent=random",
            "opponent='random' must be random or policy, in one of Conn",
        ),
        ("game=KuhnPoker-v0", "show each side the other's cards; set opponent=random"),
        ("game=Nim-v0:stones=2", "cannot be made: TypeError: .*'stones'"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        made(*named(f"textarena:{options}")[:2])
    assert str(error.value).startswith("environment.name: textarena")
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    refused(r"pip install 'semrl_jax\[textarena\]'", kind.games)
