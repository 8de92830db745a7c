"""One description, five forms: what `dflash-serve deploy --render` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import yaml

from .chart import manifests, values
from .compose import compose
from .dynamo import dynamo
from .kserve import kserve
from .workload import Document, Workload

Form = Literal["helm", "manifests", "dynamo", "kserve", "compose"]

FORMS: Mapping[Form, Callable[[Workload, str], Iterator[Document]]] = {
    "helm": values,
    "manifests": manifests,
    "dynamo": dynamo,
    "kserve": kserve,
    "compose": compose,
}


def render(workload: Workload, form: Form) -> str:
    """The YAML text, documents separated by `---`.

    Raises:
        UserError: the form has no words for this deployment.
    """
    return "---\n".join(_text(document) for document in FORMS[form](workload, _text(workload.fields)))


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes texts of several lines as blocks: people read these files."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def _text(document: Document) -> str:
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120)
    return text
