"""One description, five forms: what `dflash-serve deploy --render` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from .chart import manifests, values
from .compose import compose
from .dynamo import dynamo
from .pod import kserve
from .workload import Document, Workload, yaml_text

Form = Literal["helm", "manifests", "dynamo", "kserve", "compose"]

FORMS: Mapping[Form, Callable[[Workload], Iterator[Document]]] = {
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
    return "---\n".join(yaml_text(document) for document in FORMS[form](workload))
