"""The simple commands of a shell script, in order, with what is known about when they run.

Understands quotes, comments, redirections, here-documents, assignments, `if` and `case`, but does not run anything: a
substitution stays in its word, and a loop or a function counts as its body.
"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<skip> [^\S\n]+ | \\\n | (?:(?<=[\s;|&()])|^)\#[^\n]* )
  | (?P<here> \d*<<(?!<)-?[^\S\n]* (?P<delimiter> '[^'\n]+' | "[^"\n]+" | \\?[\w.-]+ ) )
  | (?P<redirection> (?:\d+|&)?[<>]{1,3}&?[^\S\n]*[^\s;|&()<>"']* )
  | (?P<end> \n | [;|&()]+ )
  | (?P<word> (?:
        \\. | "(?:\\.|[^"\\])*" | '[^']*' | \$\((?:[^()]|\([^()]{0,200}\)){0,400}\) | \$\{[^{}\n]*\}
      | [^\s"';|&()<>\\]
    )+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""\\\n|\\(.)|"((?:\\.|[^"\\])*)"|'([^']*)'""", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
# May precede a command.
_KEYWORDS = ("if", "then", "elif", "else", "while", "until", "do", "!", "{", "exec", "command", "time", "case")
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_MAX_ENDLESS = 20  # each costs a search through the rest of the script
# Variables that each process of a launcher has: a script that tests them may know that it is one of several.
_PROCESS_VARIABLE = re.compile(r"\$\{?(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|TORCHELASTIC_\w+|LLMTRAIN_\w+)\b")


@dataclass(frozen=True)
class ScriptCommand:
    words: list[str]
    """Empty for a line of assignments."""
    line: int
    assigned: dict[str, str] = field(default_factory=dict)
    """Variables of the shell that it sets."""
    branch: tuple[int, int] | None = None
    """Number of the innermost `case`, or `if` about variables of a process, that it is in, and of its branch there."""
    is_conditional: bool = False
    """Whether it is in any `if` or `case`."""
    is_guess: bool = False
    """Behind a part that could not be parsed, such as an open quote."""
    here_document: str | None = None


@dataclass
class _Block:
    """An open `if` or `case`."""

    number: int
    is_case: bool
    branch: int = 0
    is_in_condition: bool = True
    """Between `if` and `then`, or in the pattern of a `case`."""
    is_about_process: bool = False


def parse_script(text: str) -> list[ScriptCommand]:
    return _Parser(text).parse()


def is_assignment(word: str) -> bool:
    return _ASSIGNMENT.fullmatch(word) is not None


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._line = 1
        self._counted = 0
        self._commands: list[ScriptCommand] = []
        self._blocks: list[_Block] = []
        self._block_count = 0
        self._is_guess = False
        self._delimiters: list[str] = []
        """Delimiters of here-documents that begin at the next line."""
        self._endless: set[str] = set()
        self._start_command()

    def _start_command(self) -> None:
        self._words: list[str] = []
        self._assigned: dict[str, str] = {}
        self._array: str | None = None
        """Name of the array whose parentheses are open."""
        self._start_line = 0

    def parse(self) -> list[ScriptCommand]:
        while self._position < len(self._text):
            match = _TOKEN.match(self._text, self._position)
            if match is None:  # an open quote, which the shell will report unless it is in a part that we misread
                self._is_guess = True
                self._position = (self._text.find("\n", self._position) + 1) or len(self._text)
                self._end_command()
                continue
            self._position = match.end()
            if match["here"]:
                self._delimiters.append(unquoted(match["delimiter"]))
            elif match["end"]:
                self._end(match["end"])
            elif match["word"]:
                self._word(match["word"], match.start())
        self._end_command()
        return self._commands

    def _word(self, word: str, start: int) -> None:
        if not self._words and not self._assigned:
            self._start_line = self._line_of(start)
        if self._array is not None:
            self._assigned[self._array] += f" {word}"
            return
        block = self._innermost()
        if block and block.is_in_condition and _PROCESS_VARIABLE.search(word):
            block.is_about_process = True
        if self._words:
            self._words.append(unquoted(word))
        elif word in _KEYWORDS or word in ("fi", "esac"):
            self._keyword(word)
        elif assignment := _ASSIGNMENT.fullmatch(word):
            self._assigned |= _assigned(assignment)
            if not assignment[3] and self._text[self._position : self._position + 1] == "(":
                self._array = assignment[1]
        else:
            self._words.append(unquoted(word))

    def _keyword(self, word: str) -> None:
        if word in ("if", "case"):
            self._block_count += 1
            self._blocks.append(_Block(self._block_count, is_case=word == "case"))
        elif word in ("fi", "esac"):
            self._blocks[-1:] = []
        elif word in ("then", "elif", "else") and self._blocks:
            self._blocks[-1].is_in_condition = word == "elif"
            if word != "elif":  # a branch begins at `then` or `else`
                self._blocks[-1].branch += 1

    def _end(self, end: str) -> None:
        if self._array is not None and ")" not in end:  # the opening parenthesis, or a line of the array
            return
        block = self._innermost()
        if block and block.is_case and block.is_in_condition:
            self._start_command()  # `case WORD in` and patterns are not commands
            block.is_in_condition = ")" not in end
        else:
            self._end_command(end)
        if block and block.is_case and end.startswith(";;"):
            block.branch += 1
            block.is_in_condition = True

    def _innermost(self) -> _Block | None:
        if not self._blocks:
            return None
        return self._blocks[-1]

    def _end_command(self, end: str = "") -> None:
        body = None
        if "\n" in end and self._delimiters:
            body = self._here_documents()
        assigned = self._assigned_by_command()
        if self._words or assigned:
            self._commands.append(
                ScriptCommand(
                    words=self._words,
                    line=self._start_line,
                    assigned=assigned,
                    branch=self._branch(),
                    is_conditional=bool(self._blocks),
                    is_guess=self._is_guess,
                    here_document=body,
                )
            )
        self._start_command()

    def _assigned_by_command(self) -> dict[str, str]:
        """The variables of the shell that the command sets."""
        if not self._words:
            return self._assigned
        assigned: dict[str, str] = {}
        if self._words[0] in _DECLARATIONS:
            for word in self._words[1:]:
                pair = _ASSIGNMENT.fullmatch(word)
                if pair:
                    assigned |= _assigned(pair)
        return assigned  # assignments before any other command are for its environment only

    def _branch(self) -> tuple[int, int] | None:
        for block in reversed(self._blocks):
            if block.is_case or block.is_about_process:
                return block.number, block.branch
        return None

    def _here_documents(self) -> str:
        """Skip the here-documents that begin here, and return the last. One without an end was none (`1 << 3`)."""
        body = ""
        for delimiter in self._delimiters:
            if delimiter in self._endless or len(self._endless) > _MAX_ENDLESS:
                continue
            pattern = re.compile(rf"^\t*{re.escape(delimiter)}[^\S\n]*$", re.MULTILINE)
            end = pattern.search(self._text, self._position)
            if end:
                body = self._text[self._position : end.start()]
                self._position = end.end()
            else:
                self._endless.add(delimiter)
        self._delimiters = []
        return body

    def _line_of(self, position: int) -> int:
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line


def _assigned(assignment: re.Match[str]) -> dict[str, str]:
    name, plus, value = assignment.groups()
    value = unquoted(value)
    if plus:  # A+=b is A=${A}b
        value = f"${{{name}}}{value}"
    return {name: value}


def unquoted(word: str) -> str:
    return _QUOTED.sub(lambda match: match[1] or match[2] or match[3] or "", word)
