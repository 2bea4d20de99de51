"""What a caller of a stack's client meets, by introspection in the stack's own process. Adapters of every stack use it.

Everything is text without addresses, so that two runs of one release say the same. Names that begin with an underscore are not
public.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import inspect
import operator
import re
import sys
from abc import ABCMeta
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, ForwardRef, is_typeddict

import msgspec

from harness.contract.messages import CensusResult, Offer

CONSTRUCTOR = "client"
"""Name of the client's constructor: clients of different stacks are different classes."""
_QUALIFIED = re.compile(r"\b(?:\w+\.)+(?=\w)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OLD_NAMES = re.compile(r"\b(Dict|List|Tuple|Set|Type)\b(?=\[)")
_CONFIGURATION = ("ie_cfg", "inference_engine", "inference_engine_cfg", "engine_cfg")
"""Names under which code holds an engine's configuration."""
_ENGINES = "generator.inference_engine"
_PATH = re.compile(r"(?:self\.)?cfg\.((?:generator|trainer)\.[\w.]+)")
"""A key of the whole configuration, by its path."""
_ENVIRONMENT = ("os.environ", "os.environ.get", "os.getenv")


def of(client: Any, *, types: Mapping[str, Any], keys: Iterable[Offer] = ()) -> CensusResult:
    """The census of this client. `types`: names that its module has for type checkers only → their types."""
    kind = type(client)
    methods = [*_methods(client)]
    known = {**types, **vars(sys.modules[kind.__module__])}
    named = _types(methods, known, kind.__module__.partition(".")[0])
    attributes = _attributes(client, {offer.name for offer in methods})
    return CensusResult(offers=[*methods, *_protocols(kind), *attributes, *named, *_raised(kind), *keys])


def keys(configuration: type, path: str, read: Iterable[str]) -> Iterator[Offer]:
    """Those of the configuration's fields that `read` names, under "path.field"."""
    wanted = set(read)
    for offer in _fields(configuration):
        name = offer.name.partition(".")[2]
        if name in wanted:
            yield msgspec.structs.replace(offer, name=f"{path}.{name}", kind="key")


def options(engines: Sequence[Mapping[str, str]]) -> Iterator[Offer]:
    """What the engines run with: option → value of each engine. Engines that differ are listed in their order."""
    for name in sorted({name for engine in engines for name in engine}):
        values = [engine.get(name, "nothing") for engine in engines]
        yield Offer(name=name, kind="option", default=values[0] if len({*values}) == 1 else ", ".join(values))


def read_by(readers: Iterable[str]) -> Iterator[str]:
    """Fields of an engine's configuration that this source code reads. A reader is a module, or "module:Class.function" of it.
    The code is read and not imported."""
    for node in _loads(readers):
        holder = ast.unparse(node.value)
        if holder.rpartition(".")[2] in _CONFIGURATION:
            yield node.attr


def others(configuration: Any, readers: Iterable[str]) -> Iterator[Offer]:
    """Keys of the configuration outside its section for engines that this source code reads by their whole path."""
    read = {found[1] for node in _loads(readers) if (found := _PATH.fullmatch(ast.unparse(node)))}
    for path in sorted(path for path in read if not path.startswith(_ENGINES)):
        if not dataclasses.is_dataclass(operator.attrgetter(path)(configuration)):
            yield Offer(name=path, kind="key")


def variables(package: str, constants: str) -> Iterator[Offer]:
    """Environment variables that the package's source code reads: by itself, or as constants of the module `constants`, which reads
    them. The code is read and not imported."""
    named = {
        target.id: variable
        for node in ast.iter_child_nodes(_tree(constants))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
        for variable in _variables(node)
    }
    found: dict[str, Offer] = {}
    for _, tree in _trees(_source(package).parent):
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found |= {one.name: one for one in (*_variables(tree), *(named[name] for name in used & named.keys()))}
    yield from (found[name] for name in sorted(found))


def switches(constants: str) -> Iterator[Offer]:
    """Environment variables that this module compares with words for yes, whichever part of the stack uses them. The code is read
    and not imported."""
    for node in ast.iter_child_nodes(_tree(constants)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare):
            yield from (msgspec.structs.replace(one, kind="switch") for one in _variables(node))


def asked_of(holder: str, readers: Iterable[str], by: str) -> Iterator[Offer]:
    """What this source code asks of the object that it holds as `holder` ("self.client"): methods, arguments that it gives by name,
    and attributes. An object of the user's own has to have all of them. `by` begins each name."""
    found: set[str] = set()
    for node in (node for reader in readers for node in ast.walk(_tree(reader))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == holder:
            found.add(f"{by} asks for {node.attr}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == holder
        ):
            found |= {f"{by} asks for {node.func.attr}({given.arg})" for given in node.keywords if given.arg}
    yield from (Offer(name=name, kind="need") for name in sorted(found))


def imports(packages: Iterable[str]) -> Iterator[Offer]:
    """What users import from the modules of these packages, as "module:name": classes, functions with their parameters, and what a
    package hands on from its modules. The code is read and not imported. A package that is not there has nothing."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in [] if spec is None else spec.submodule_search_locations or ():
            for file, tree in _trees(Path(folder)):
                parts = file.relative_to(folder).with_suffix("").parts
                if not any(part.startswith("_") and part != "__init__" for part in parts):
                    yield from _importable(".".join((package, *parts)).removesuffix(".__init__"), tree)


def _importable(module: str, tree: ast.Module) -> Iterator[Offer]:
    """What a module takes from other packages than its own top one is not its own to give."""
    told, family = _told(tree), module.partition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] == family):
            taken = (alias.asname or alias.name for alias in node.names)
            yield from (Offer(name=f"{module}:{one}", kind="import", form="handed on") for one in taken if one in told)
        elif not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        elif isinstance(node, ast.ClassDef):
            yield Offer(name=f"{module}:{node.name}", kind="import", form="class")
        else:
            form = "async" if isinstance(node, ast.AsyncFunctionDef) else "sync"
            yield Offer(name=f"{module}:{node.name}", kind="import", form=form)
            yield from _parameters(f"{module}:{node.name}", node.args)


def _told(tree: ast.Module) -> Set[str]:
    """The names of a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets
        ):
            return {str(one) for one in ast.literal_eval(node.value)}
    return set()


def _parameters(function: str, given: ast.arguments) -> Iterator[Offer]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    for one, default in pairs:
        said = None if default is None else ast.unparse(default)
        yield Offer(name=f"{function}({one.arg})", kind="parameter", default=said)
    for stars, more in (("*", given.vararg), ("**", given.kwarg)):
        if more is not None:
            yield Offer(name=f"{function}({stars}{more.arg})", kind="parameter")


def _variables(tree: ast.AST) -> Iterator[Offer]:
    """The environment variables that this code reads under a literal name."""
    for node in ast.walk(tree):
        default: str | None = None
        if isinstance(node, ast.Call) and node.args:
            reader, name = node.func, node.args[0]
            default = ast.unparse(node.args[1]) if len(node.args) > 1 else None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            reader, name = node.value, node.slice
        else:
            continue
        if ast.unparse(reader) in _ENVIRONMENT and isinstance(name, ast.Constant):
            yield Offer(name=str(name.value), kind="variable", default=default)


def _source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{module} has no source code here")
    return Path(spec.origin)


def _trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Each source file below a folder, with its code."""
    for file in sorted(folder.rglob("*.py")):
        yield file, ast.parse(file.read_text(encoding="utf-8"))


def _tree(module: str) -> ast.AST:
    return ast.parse(_source(module).read_text(encoding="utf-8"))


def _loads(readers: Iterable[str]) -> Iterator[ast.Attribute]:
    for reader in readers:
        module, _, place = reader.partition(":")
        tree = _tree(module)
        for name in filter(None, place.split(".")):
            tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
        yield from (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        )


def _protocols(kind: type) -> Iterator[Offer]:
    """What a client is beside its own class: its public bases, and each protocol of the standard library that it keeps."""
    known = [getattr(abc, name) for name in abc.__all__]
    kept = [one for one in (*known, AbstractContextManager, AbstractAsyncContextManager) if _keeps(kind, one)]
    bases = [base for base in kind.__mro__[1:] if base.__module__ not in sys.stdlib_module_names]
    for name in _public(one.__name__ for one in dict.fromkeys((*bases, *kept))):
        yield Offer(name=f"{CONSTRUCTOR} is {name}", kind="protocol")


def _keeps(kind: type, protocol: type) -> bool:
    return isinstance(protocol, ABCMeta) and issubclass(kind, protocol)


def _methods(client: Any) -> Iterator[Offer]:
    kind = type(client)
    yield from _method(CONSTRUCTOR, kind)
    for name in _public(dir(kind)):
        if isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod) or inspect.isfunction(
            inspect.getattr_static(kind, name)
        ):
            yield from _method(name, getattr(client, name))


def methods_of(kind: type, name: str) -> Iterator[Offer]:
    """The constructor, as `name`, and the public methods, as "name.method", of a class that users extend. Parameters of methods
    have no defaults here: a method that takes their place has to take each of them."""
    yield from _method(name, kind)
    for method in _public(dir(kind)):
        function = inspect.getattr_static(kind, method)
        if inspect.isfunction(function):
            for offer in _method(f"{name}.{method}", function.__get__(object())):
                yield msgspec.structs.replace(offer, default=None)


def _method(name: str, function: Callable[..., Any]) -> Iterator[Offer]:
    signature = inspect.signature(function)
    result = "" if name == CONSTRUCTOR else _text(signature.return_annotation)
    yield Offer(name=name, kind="method", form=_form(inspect.unwrap(function)), type=result)
    for parameter in signature.parameters.values():
        if not parameter.name.startswith("_"):
            given = parameter.default is not inspect.Parameter.empty
            yield Offer(
                name=f"{name}({str(parameter.replace(annotation=inspect.Parameter.empty)).partition('=')[0]})",
                kind="parameter",
                form=parameter.kind.description,
                type=_text(parameter.annotation),
                default=_value(parameter.default) if given else None,
            )


def _form(function: Callable[..., Any]) -> str:
    if inspect.isasyncgenfunction(function):
        return "async generator"
    if inspect.iscoroutinefunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else "sync"


def _attributes(client: Any, methods: set[str]) -> Iterator[Offer]:
    kind = type(client)
    said = {name: hint for base in reversed(kind.__mro__) for name, hint in inspect.get_annotations(base).items()}
    for name in _public({*dir(kind), *vars(client)} - methods):
        static = inspect.getattr_static(kind, name, None)
        if isinstance(static, property):
            hint = inspect.signature(static.fget).return_annotation if static.fget else inspect.Parameter.empty
            yield Offer(name=name, kind="attribute", form="property", type=_text(hint))
        elif name in vars(client):
            yield Offer(name=name, kind="attribute", type=_text(said.get(name, type(vars(client)[name]))))
        elif static is not None:  # None takes an inherited method away, as __hash__ = None does
            yield Offer(name=name, kind="attribute", form="of the class", type=type(static).__name__)


def _types(methods: Iterable[Offer], known: Mapping[str, Any], package: str) -> Iterator[Offer]:
    """The fields of each type of the client's own package that its methods name, and of the types that these name."""
    todo = [offer.type for offer in methods if not offer.name.startswith(f"{CONSTRUCTOR}(")]
    seen: set[type] = set()
    while todo:
        for name in re.findall(r"\w+", todo.pop(0)):
            found = known.get(name)
            if not isinstance(found, type) or found in seen or found.__module__.partition(".")[0] != package:
                continue
            seen.add(found)
            fields = [*_fields(found)]
            yield from fields
            todo += [field.type for field in fields]


def _fields(kind: type) -> Iterator[Offer]:
    """Fields of a data type, members of an enumeration; an exception itself. Nothing for other classes."""
    if issubclass(kind, enum.Enum):
        for member in kind:
            yield Offer(name=f"{kind.__name__}.{member.name}", kind="field", default=_value(member.value))
    elif issubclass(kind, BaseException):
        yield Offer(name=kind.__name__, kind="exception")
    elif is_typeddict(kind):
        for name, hint in inspect.get_annotations(kind).items():
            form = "required" if name in kind.__required_keys__ else "optional"  # type: ignore[attr-defined]
            yield Offer(name=f"{kind.__name__}.{name}", kind="field", form=form, type=_text(hint))
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            given = default is not dataclasses.MISSING
            yield _field(kind, field.name, field.type, _value(default) if given else None)
    elif issubclass(kind, msgspec.Struct):
        for one in msgspec.structs.fields(kind):
            default = one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
            yield _field(kind, one.name, one.type, None if default is msgspec.NODEFAULT else _value(default))


def _field(kind: type, name: str, hint: Any, default: str | None) -> Offer:
    return Offer(name=f"{kind.__name__}.{name}", kind="field", type=_text(hint), default=default)


def _raised(kind: type) -> Iterator[Offer]:
    """The classes of the exceptions that the code of the client's module raises by name."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = [ast.unparse(one.func) for one in raised if isinstance(one, ast.Call)]
    for name in sorted({name for name in calls if re.fullmatch(r"(\w+\.)*[A-Z]\w*", name)}):
        yield Offer(name=f"raises {name.rpartition('.')[2]}", kind="exception")


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _text(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    if isinstance(annotation, ForwardRef):  # of a TypedDict
        annotation = annotation.__forward_arg__
    said = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    plain = _QUALIFIED.sub("", _ADDRESS.sub("", said)).replace("'", "").replace('"', "")
    return _OLD_NAMES.sub(lambda found: found[0].lower(), plain)


def _value(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))
