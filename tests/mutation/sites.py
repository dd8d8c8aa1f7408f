"""Where a module can be changed in its meaning, which of these places are chosen, and a tree that holds all changes."""

import ast
import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# How many of each kind are chosen.
QUOTAS = {"comparison": 24, "call": 20, "constant": 20, "and, or, not": 10, "+, -": 6}
_TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
}  # fmt: skip
# Sites keep their names where the product's changed.
OLD_NAME, NEW_NAME = "engine" + "ry", "engine" + "smith"
# What is printed or logged, and what only types or texts are made of.
_LOGS = ("log", "_log", "logger", "logging", "warnings", "echo", "print")
_NOT_INSIDE = (ast.JoinedStr, ast.match_case, ast.Assert)


@dataclass(frozen=True)
class Site:
    """A place in a module, named so that it is the same in another commit: by its function and text, not its line."""

    module: str
    function: str
    kind: str
    text: str
    count: int
    line: int = field(compare=False, repr=False)
    at_import: bool = field(compare=False, repr=False)
    node: ast.expr = field(compare=False, repr=False)

    @property
    def path(self) -> str:
        return self.module.replace(OLD_NAME, NEW_NAME)

    def rank(self, seed: int) -> int:
        """A random number that hangs on the seed and this site alone."""
        named_text = repr((seed, self.module, self.function, self.kind, self.text, self.count))
        return int.from_bytes(hashlib.sha256(named_text.encode()).digest()[:8])

    def number(self, seed: int) -> int:
        """What the site is called, whichever others are chosen: the first 24 bits of its rank."""
        return self.rank(seed) >> 40

    def mutant(self, seed: int) -> ast.expr:
        node = copy.deepcopy(self.node)
        match node:
            case ast.Compare():
                turned_type = _TURNED[type(node.ops[0])]
                node.ops[0] = turned_type[self.rank(seed) % len(turned_type)]()
            case ast.Call():
                return ast.Constant(None)
            case ast.Constant():
                node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
            case ast.BoolOp():
                node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            case ast.UnaryOp():
                return node.operand
            case ast.BinOp():
                node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return node


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.module, self.depth = module.replace(NEW_NAME, OLD_NAME), 0
        self.names: list[str] = []
        self.found: list[Site] = []
        self.counts: dict[tuple[str, str, str], int] = {}

    def visit(self, node: ast.AST) -> None:
        """Look at a node and below it, annotations, decorators and messages left out."""
        if isinstance(node, _NOT_INSIDE) or _is_unchecked(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._definition(node)
        elif isinstance(node, ast.AnnAssign):
            for part in [node.value] if node.value else []:
                self.visit(part)
        elif isinstance(node, ast.arg):
            return
        else:
            if kind := _kind(node):
                self._add(kind, node.value if isinstance(node, ast.Expr) else node)  # type: ignore[arg-type]
            self.generic_visit(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        function = not isinstance(node, ast.ClassDef)
        if not isinstance(node, ast.ClassDef):
            self.visit(node.args)
        self.names.append(node.name)
        self.depth += function
        for statement in node.body:
            self.visit(statement)
        self.depth -= function
        self.names.pop()

    def _add(self, kind: str, node: ast.expr) -> None:
        key = ".".join(self.names), kind, ast.unparse(node).lower().replace(NEW_NAME, OLD_NAME)
        count = self.counts[key] = self.counts.get(key, 0) + 1
        self.found.append(Site(self.module, *key, count, node.lineno, not self.depth, node))


def _kind(node: ast.AST) -> str:
    match node:
        case ast.Compare():
            return "comparison"
        case ast.Expr(value=ast.Call()):
            return "call"
        case ast.Constant(value=bool() | int() | float()):
            return "constant"
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return "and, or, not"
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _of_texts(node):
            return "+, -"
    return ""


def _of_texts(node: ast.BinOp) -> bool:
    texts = ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp
    return any(
        isinstance(side, texts) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _is_unchecked(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=function) | ast.Expr(value=ast.Call(func=function)):
            return bool({*ast.unparse(function).split(".")} & {*_LOGS})
        case ast.keyword(arg="strict"):  # of zip, which asserts what holds
            return True
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


def find(text: str, module: str) -> list[Site]:
    finder = _Finder(module)
    finder.visit(ast.parse(text))
    return finder.found


def choose(sites: Iterable[Site], seed: int, quotas: Mapping[str, int] = QUOTAS) -> list[Site]:
    """The sites of lowest rank, as many of each kind as its quota says. Where a site goes, one other comes."""
    ranked = sorted(sites, key=lambda site: site.rank(seed))
    return [site for kind, quota in quotas.items() for site in [item for item in ranked if item.kind == kind][:quota]]


class _Planter(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[int, tuple[int, ast.expr]]) -> None:
        self.numbers = numbers

    def visit(self, node: ast.AST) -> ast.AST:
        number, mutant = self.numbers.get(id(node), (-1, None))
        self.generic_visit(node)
        return ast.IfExp(_ask(number), mutant, node) if mutant else node  # type: ignore[arg-type]


def _ask(number: int) -> ast.Call:
    return ast.Call(ast.Name("_mutant", ast.Load()), [ast.Constant(number)], [])


def plant(text: str, sites: Sequence[Site], seed: int, switch: str) -> str:
    """A module's source with a question to the module `switch` at each of its sites.

    Python evaluates some sites while it imports; those count as reached by whatever calls a function of the module.
    """
    tree = ast.parse(text)
    finder = _Finder(sites[0].module)
    finder.visit(tree)
    numbers = [(site.number(seed), site) for site in finder.found if site in sites]
    planted_tree = _Planter({id(site.node): (number, site.mutant(seed)) for number, site in numbers}).visit(tree)
    requests = [number for number, site in numbers if site.at_import]
    for node in ast.walk(tree):
        if requests and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = 1 if ast.get_docstring(node) is not None else 0
            node.body[place:place] = [ast.Expr(_ask(number)) for number in requests]
    futures = [
        at for at, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    place = futures[-1] + 1 if futures else int(ast.get_docstring(tree) is not None)
    tree.body.insert(place, ast.ImportFrom(switch, [ast.alias("active", "_mutant")], 0))
    return ast.unparse(ast.fix_missing_locations(planted_tree))
