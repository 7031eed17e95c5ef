"""Make a model answer in JSON that follows a schema.

    python examples/structured_output.py [--model demo]

Tokens that would break the schema are masked before sampling, so the output always parses.
"""

from __future__ import annotations

import argparse
import json

from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.structured_output import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    params = SamplingParams(max_tokens=80, structured=StructuredOutput(json_schema=json.dumps(SCHEMA)))
    with LLM(EngineConfig(model=args.model)) as llm:
        (output,) = llm.generate("A person:", params)
    print(json.loads(output.outputs[0].text))


if __name__ == "__main__":
    main()
