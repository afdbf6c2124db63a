"""The library and program `llm` against a Lacuna server: `llm_client.py URL`.

Prints one line, `{"llm": [what works]}`, and exits with 0 if everything is as its users expect.
"""

import json
import os
import sys
import tempfile
from pathlib import Path


def whole(model):
    assert model.prompt("What is ownership?", stream=False, max_tokens=16).text()


def stream(model):
    pieces = list(model.prompt("What is ownership?", max_tokens=24))
    assert len(pieces) > 10, "the reply comes in pieces"


def conversation(model):
    talk = model.conversation()
    first = talk.prompt("What is ownership?", max_tokens=16)
    # A prompt is of what had been said when it was made.
    assert first.text()
    second = talk.prompt("Why?", max_tokens=16)
    assert second.text()
    assert second.usage().input > first.usage().input


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        entry = {"model_id": "here", "model_name": "demo", "api_base": sys.argv[1] + "/v1"}
        # JSON is YAML.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
        import llm

        checks = [whole, stream, conversation]
        for check in checks:
            model = llm.get_model("here")
            model.key = "none"
            check(model)
    print(json.dumps({"llm": [check.__name__ for check in checks]}))


main()
