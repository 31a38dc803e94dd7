"""Games of the package textarena that need no network, for one player or two.

A message for the policy is what the game has told its player since the last move, with the last
board alone. Moves themselves are left out: the game describes them.

In self-play, the policy plays both sides in turn, and is trained on the moves of both or of the
first. With two players, an illegal move loses. A game for one player keeps textarena's own rule and
reward.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from semrl_jax.environments.interface import Turn
from semrl_jax.support.errors import UserError

ONE_PLAYER = (
    "2048", "Bandit", "Blackjack", "Countdown", "Cryptarithm", "FifteenPuzzle", "FrozenLake",
    "GuessTheNumber", "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump",
    "RushHour", "Secretary", "Set", "Slitherlink", "Sokoban", "Sudoku", "ThreeCardMonte",
    "TowerOfHanoi",
)  # fmt: skip
# Legal moves of the games for two, in a state of the game.
MOVES: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "ConnectFour": lambda state: [
        f"[col {column}]" for column, cell in enumerate(state["board"][0]) if cell == "."
    ],
    "KuhnPoker": lambda state: [f"[{name}]" for name in state["current_legal_action_tree"]],
    "Nim": lambda state: [
        f"[{pile} {taken + 1}]" for pile, size in enumerate(state["piles"]) for taken in range(size)
    ],
    "TicTacToe": lambda state: [
        f"[{3 * row + column}]"
        for row, cells in enumerate(state["board"])
        for column, cell in enumerate(cells)
        if not cell
    ],
}
HIDDEN = ("KuhnPoker",)  # a transcript of both sides would show each the other's cards
RANDOM, POLICY = OPPONENTS = ("random", "policy")
_LONG = re.compile(r"(\d{99})\d+")  # `int` raises for such numbers, and so would a game


class Environment:
    """A game.

    Args:
      game: as textarena calls it, such as "FrozenLake-v0".
      opponent: in a game for two, "random" plays random legal moves, and the task decides who
        begins; "policy" is the policy itself, whose second side is not trained; without one, both
        sides are.
      options: of the game's class in textarena.
    """

    def __init__(self, game: str, opponent: str = "", **options: Any):
        known = games()
        family = _family(str(game))
        if game not in known:
            near = difflib.get_close_matches(str(game), known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"game={game!r:.100} is no game for one or two players without a network; {hint}"
                f"choose one of {', '.join(n for n in known if n == f'{_family(n)}-v0')}, or a "
                "variant."
            )
        if opponent not in ("", *OPPONENTS) or (opponent and family not in MOVES):
            raise UserError(
                f"opponent={opponent!r:.100} must be {' or '.join(OPPONENTS)}, in one of "
                f"{', '.join(MOVES)}, or be left out."
            )
        if family in HIDDEN and opponent != RANDOM:
            why = "self-play would show each side the other's cards"
            raise UserError(f"game={game!r}: {why}; set opponent={RANDOM}.")
        self._game, self._options, self._family = game, options, family
        self._opponent = opponent
        self.is_self_play = family in MOVES and not opponent
        self._made()

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        numbers = random.Random(seed)
        return [{"game": self._game, "number": numbers.randrange(2**32)} for _ in range(count)]

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._playing = self._made()  # an object may keep what an earlier game has shuffled
        self._playing.reset(num_players=2 if self._family in MOVES else 1, seed=seed)
        self._state = self._playing.state
        if self._family in MOVES:
            self._state.error_allowance = 0
        self._random = random.Random(f"opponent {seed}")  # the game draws from the global one
        self._side = self._random.randrange(2) if self._opponent == RANDOM else 0
        self._let_opponent_move()
        return self._told()

    def step(self, message: str) -> Turn:
        state, mover = self._state, self._state.current_player_id
        if not state.done:  # the opponent's first move may have ended it
            self._playing.step(_LONG.sub(r"\1", message))
        self._let_opponent_move()
        if not state.done:
            is_own = self._opponent != POLICY or state.current_player_id == self._side
            return Turn(self._told(), is_own=is_own)
        if self._opponent or self._family not in MOVES:
            reward = state.rewards[self._side]
            # Some games of 0.7.4 swap reward and reason when an illegal move ends them.
            return Turn(reward=0.0 if isinstance(reward, str) else reward, done=True)
        return Turn(reward=rewards_of_both(state.rewards[mover], state.turn), done=True)

    def _made(self) -> Any:
        return _package().make(self._game, **self._options)

    def _let_opponent_move(self) -> None:
        state = self._state
        while self._opponent == RANDOM and not state.done and state.current_player_id != self._side:
            self._playing.step(self._random.choice(MOVES[self._family](state.game_state)))

    def _told(self) -> str:
        """What the player who moves next has not seen yet."""
        kinds = _package().ObservationType
        found = self._state.get_current_player_observation()
        boards = [index for index, (_, _, kind) in enumerate(found) if kind is kinds.GAME_BOARD]
        hidden = {*boards[:-1]}
        return "\n\n".join(
            str(text).strip()
            for index, (_, text, kind) in enumerate(found)
            if kind is not kinds.PLAYER_ACTION and index not in hidden
        )


def rewards_of_both(outcome: float, num_turns: int) -> list[float]:
    """The rewards of all turns of a game between two sides that move in turn.

    The rewards from a turn to the end sum to the outcome of the side that moved. All sum to 0, as
    if the first turn, which then has no outcome, were of both sides: credit by episodes would
    otherwise teach both sides to let the first one win.

    Args:
      outcome: for the side that moved last: 1 won, -1 lost, 0 a draw.
    """
    returns = [outcome * (-1) ** (num_turns - 1 - turn) for turn in range(num_turns)]
    if num_turns > 1:
        returns[0] = 0
    return [own - later for own, later in zip(returns, [*returns[1:], 0], strict=True)]


def games() -> list[str]:
    return [
        name
        for name in _package().envs.registration.ENV_REGISTRY
        if _family(name) in (*ONE_PLAYER, *MOVES) and not name.endswith(("-raw", "-train"))
    ]


def _family(game: str) -> str:
    return game.partition("-")[0]


def _package() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise UserError(
            f"textarena is a package that is missing ({error}); install it with "
            "pip install 'semrl_jax[textarena]'."
        ) from None
    return textarena
