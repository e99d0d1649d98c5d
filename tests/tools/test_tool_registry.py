"""From YAML to tools; every mistake is one error that names file, entry, what was got and what to do."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest

from verl_mt.config_paths import configs_root
from verl_mt.errors import ConfigError, DataError, PluginError, ToolCallError, VerlMTError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.calculator import Calculator
from verl_mt.tools.function_tool import FunctionTool, function_tool
from verl_mt.tools.registry import load_tools
from verl_mt.tools.toolset import ToolSet, parse_row_kwargs

CALCULATOR = "verl_mt.tools.calculator.Calculator"
MODULE = '''
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_tool import function_tool

@function_tool
def double(x: int) -> int:
    """Double a number.

    Args:
        x: the number
    """
    return 2 * x

def plain(x: int) -> int:
    return x

class NoSchema(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "never"

class Raises(BaseTool):
    def __init__(self, config, tool_schema):
        raise KeyError("index_path")

class NoSuper(BaseTool):
    def __init__(self, config, tool_schema):
        self.tool_schema = tool_schema

class NotATool:
    pass
'''


@pytest.fixture
def write(tmp_path: Path):
    """Write a tools YAML; `{mod}` in it is a plug-in file with some tools."""
    module = tmp_path / "my_tools.py"
    module.write_text(MODULE)

    def write_yaml(text: str) -> Path:
        file = tmp_path / "tools.yaml"
        file.write_text(textwrap.dedent(text).replace("{mod}", str(module)))
        return file

    return write_yaml


@pytest.mark.cap("V2")
def test_a_tools_file_gives_one_object_per_entry_with_its_config(write):
    tools = load_tools(
        write(f"""
        tools:
          - class_name: {CALCULATOR}
            config: {{precision: 3, type: native}}
            tool_schema: {{}}
          - class_name: "{{mod}}:double"
        """)
    )
    assert tools.names == ["calculator", "double"]
    assert tools["calculator"].config == {"precision": 3, "type": "native"}
    assert tools["calculator"].get_openai_tool_schema().function.parameters.required == ["expression"]
    assert isinstance(tools["double"], FunctionTool) and tools["double"](4) == 8
    assert [s["function"]["name"] for s in tools.schemas(["double"])] == ["double"]
    assert load_tools(None).names == []


def test_a_file_that_is_not_there_and_a_function_without_hints_are_named_as_the_user_named_them(write):
    with pytest.raises(PluginError, match=r"tools\.yaml.*: no file 'part_tools\.py' \(looked at "):
        load_tools(write("tools: [{class_name: 'part_tools.py:count'}]"))
    file = write("tools: [{class_name: '{mod}:untyped'}]")
    module = file.with_name("my_tools.py")
    module.write_text(module.read_text() + "\n\n@function_tool\ndef untyped(x):\n    return x\n")
    with pytest.raises(PluginError) as caught:
        load_tools(file)
    assert f"{module}:untyped" in str(caught.value) and "verl_mt_plugin" not in str(caught.value)


# mcp.yaml starts a server: tests/test_serve_tools.py.
SHIPPED = [f for f in sorted((configs_root() / "tools_configs").glob("*.yaml")) if f.name != "mcp.yaml"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.name)
def test_every_shipped_tools_file_loads(file):
    assert len(load_tools(file)) >= 1


def test_the_schema_of_the_yaml_reaches_the_template_as_written_null_default_included(write):
    tools = load_tools(
        write(f"""
        tools:
          - class_name: {CALCULATOR}
            tool_schema:
              type: function
              function:
                name: calc
                description: d
                parameters:
                  type: object
                  properties:
                    expression: {{type: [string, "null"], default: null, examples: ["1+1"]}}
                  additionalProperties: false
        """)
    )
    parameters = tools.schemas()[0]["function"]["parameters"]
    assert parameters["properties"]["expression"] == {"type": ["string", "null"], "default": None, "examples": ["1+1"]}
    assert parameters["additionalProperties"] is False and "required" not in parameters
    tools.schemas()[0]["function"]["name"] = "changed"
    assert tools.schemas()[0]["function"]["name"] == "calc"


FUNCTION = "type: function, function: {name: f, description: d, parameters: "


@pytest.mark.parametrize(
    ("yaml", "error", "says"),
    [
        ("tools:\n  - class_name: verl_mt.tools.calculator.Calculater\n", PluginError, ["tools[0]", "'Calculator'"]),
        ("tools:\n  - class_name: no_such_module.Tool\n", PluginError, ["tools[0]", "no_such_module", "installed"]),
        ('tools:\n  - class_name: ""\n', ConfigError, ["tools[0]", "class_name", "dotted path"]),
        ("tools:\n  - config: {}\n", ConfigError, ["tools[0]", "class_name is None"]),
        ("tools:\n  - class_name: '{mod}:NotATool'\n", PluginError, ["tools[0]", "NotATool", "BaseTool"]),
        ("tools:\n  - class_name: '{mod}:plain'\n", PluginError, ["plain function", "@function_tool"]),
        ("tools:\n  - class_name: '{mod}:NoSchema'\n", PluginError, ["tools[0]", "tool_schema"]),
        ("tools:\n  - class_name: '{mod}:Raises'\n", PluginError, ["tools[0]", "KeyError", "index_path"]),
        (
            "tools:\n  - class_name: '{mod}:NoSuper'\n    tool_schema: {" + FUNCTION + "{type: object}}}\n",
            PluginError,
            ["super().__init__"],
        ),
        (
            f"tools:\n  - class_name: {CALCULATOR}\n  - class_name: {CALCULATOR}\n",
            PluginError,
            ["tools[1]", "tools[0]", "'calculator'"],
        ),
        (
            f"tools:\n  - class_name: {CALCULATOR}\n    tool_schema: {{name: f}}\n",
            ConfigError,
            ["tools[0]", "function"],
        ),
        (
            f"tools:\n  - class_name: {CALCULATOR}\n    tool_schema: {{"
            + FUNCTION
            + "{type: strin, properties: {}}}}\n",
            PluginError,
            ["tools[0]", "'f'", "strin"],
        ),
        (
            f"tools:\n  - class_name: {CALCULATOR}\n    tool_schema: {{"
            + FUNCTION
            + "{type: object, properties: {query: {type: string}}, required: [quary]}}}\n",
            PluginError,
            ["'quary'", "did you mean 'query'"],
        ),
        (f"tools:\n  - class_name: {CALCULATOR}\n    config: [1]\n", ConfigError, ["config must be a mapping", "[1]"]),
        (f"tools:\n  - class_name: {CALCULATOR}\n    confg: {{}}\n", ConfigError, ["'confg'", "did you mean 'config'"]),
        (
            f"tools:\n  - class_name: {CALCULATOR}\n    config: {{type: mcp}}\n",
            PluginError,
            ["Expected a subclass of", "MCPBaseTool"],
        ),
        ("tools: []\n", ConfigError, ["at least one entry"]),
        ("tools:\n  - just text\n", ConfigError, ["tools[0]", "just text"]),
        ("- a\n- b\n", ConfigError, ["'tools'"]),
        ("tool:\n  - class_name: x\n", ConfigError, ["'tools'", "keys ['tool']"]),
        ("tools: [\n", ConfigError, ["YAML"]),
        ("tools:\n  - class_name: ${oc.env:SURELY_NOT_SET_ANYWHERE}\n", ConfigError, ["SURELY_NOT_SET_ANYWHERE"]),
        ("", ConfigError, ["'tools'"]),
    ],
)
def test_a_broken_tools_file_is_one_error_that_names_file_and_entry(write, yaml, error, says):
    file = write(yaml)
    with pytest.raises(error) as caught:
        load_tools(file)
    assert isinstance(caught.value, VerlMTError)
    for part in ["tools.yaml", *says]:
        assert part in str(caught.value)


def test_an_absent_tools_file_names_the_key_and_the_places_tried():
    with pytest.raises(ConfigError) as caught:
        load_tools("no/such/tools.yaml")
    assert "tools_config_file" in str(caught.value) and "no/such/tools.yaml" in str(caught.value)


def test_arguments_are_checked_and_the_error_teaches():
    tools = ToolSet([Calculator({})])
    tools.check_call("calculator", {"expression": "1"})
    cases = {
        ("calculater", "{}"): ["unknown tool 'calculater'. Did you mean 'calculator'? Available: calculator."],
        ("calculator", "{}"): ["missing argument 'expression'", "{expression: string}"],
        ("calculator", "5"): ["argument 'expression': 5 is not of type 'string'"],
        ("calculator", "list"): ["must be a JSON object"],
    }
    arguments = {"{}": {}, "5": {"expression": 5}, "list": [1]}
    for (name, key), says in cases.items():
        with pytest.raises(ToolCallError) as caught:
            tools.check_call(name, arguments[key])
        for part in says:
            assert part in str(caught.value)


def test_nested_wrong_arguments_are_named_by_their_path():
    @function_tool
    def search(queries: list[str], top: int = 3) -> str:
        """Search.

        Args:
            queries: what to look for
            top: how many
        """
        return ""

    with pytest.raises(ToolCallError) as caught:
        ToolSet([search]).check_call("search", {"queries": ["a", 5], "top": "x"})
    assert "argument 'queries.1'" in str(caught.value) and "argument 'top'" in str(caught.value)
    assert "{queries: array, top: integer (optional)}" in str(caught.value)


@function_tool
def mixed(text: str, whole: int = 0, part: float = 0.0, yes: bool = False, names: list[str] | None = None) -> str:
    """Take one of each.

    Args:
        text: a text
        whole: a whole number
        part: a number
        yes: true or false
        names: texts
    """
    return repr((text, whole, part, yes, names))


@pytest.mark.parametrize(
    ("given", "wanted", "count"),
    [
        ({"text": 5}, {"text": "5"}, 1),
        ({"text": 0.25, "whole": "-3", "part": "1e2", "yes": "True"},
         {"text": "0.25", "whole": -3, "part": 100.0, "yes": True}, 4),
        ({"text": "right", "whole": 2}, {"text": "right", "whole": 2}, 0),
        ({"text": "x", "whole": "3.5"}, None, 0),  # would lose something
        ({"text": "x", "part": "nan"}, None, 0),
        ({"text": "x", "part": " -0.5E+1 ", "whole": " 10 "}, {"text": "x", "part": -5.0, "whole": 10}, 2),
        ({"text": "x", "part": "1_0"}, None, 0),  # Python reads it as 10, JSON knows no such number
        ({"text": "x", "part": ".5"}, None, 0),
        ({"text": "x", "part": "1e999"}, None, 0),
        ({"text": "x", "whole": "+3"}, None, 0),
        ({"text": "x", "whole": "\u0663"}, None, 0),
        ({"text": "x", "yes": "perhaps"}, None, 0),
        ({"text": {"a": 1}}, None, 0),
        ({"whole": "3"}, None, 0),  # text is missing all the same
        ([1], None, 0),
    ],
)  # fmt: skip
def test_simple_values_of_another_type_are_converted_where_nothing_else_is_wrong(given, wanted, count):
    tools, before = ToolSet([mixed]), copy.deepcopy(given)
    found = tools.converted("mixed", given)
    assert found == (given if wanted is None else wanted, count) and given == before
    if wanted is None:
        with pytest.raises(ToolCallError):
            tools.check_call("mixed", found[0])
    else:
        tools.check_call("mixed", found[0])


def test_rows_choose_tools_and_give_arguments_without_the_nulls_of_parquet():
    tools = ToolSet([Calculator({}), _echo])
    given = {
        "calculator": {"create_kwargs": {"ground_truth": "72", "other": None}, "execute_kwargs": None},
        "echo": None,
        "tool_of_other_rows": {"create_kwargs": {"x": None}},
    }
    assert parse_row_kwargs(given, tools.names) == {"calculator": {"create_kwargs": {"ground_truth": "72"}}}
    assert parse_row_kwargs(None, tools.names) == {}
    assert tools.for_row(given, need_tools_kwargs=True).names == ["calculator", "echo"]
    assert tools.for_row(tool_selection=["echo"]).names == ["echo"]
    assert tools.for_row(tool_selection=["echo"])["echo"] is tools["echo"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tools_kwargs": {"calclator": {"create_kwargs": {"a": 1}}}}, "did you mean 'calculator'"),
        ({"tools_kwargs": {"calculator": {"create_kwarg": {"a": 1}}}}, "did you mean 'create_kwargs'"),
        ({"tools_kwargs": {"calculator": {"create_kwargs": "a"}}}, "must be a mapping"),
        ({"tools_kwargs": {"calculator": "a"}}, "must be a mapping"),
        ({"tools_kwargs": "a"}, "must be a mapping"),
        ({"need_tools_kwargs": True}, "need_tools_kwargs"),
        ({"tool_selection": ["calc"]}, "unknown tool 'calc'"),
    ],
)
def test_a_row_that_asks_for_what_is_not_there_is_a_data_error(row, says):
    with pytest.raises(DataError, match=says):
        ToolSet([Calculator({})]).for_row(**row)


def test_two_tools_of_one_name_are_refused_from_python_too():
    with pytest.raises(PluginError, match="exists already"):
        ToolSet([Calculator({}), Calculator({})])


def test_a_tool_without_execute_says_so():
    class Empty(BaseTool):
        pass

    with pytest.raises(ValueError, match="tool_schema"):
        Empty({})


@function_tool(name="echo")
def _echo(text: str) -> str:
    """Say it back.

    Args:
        text: what to say
    """
    return text


COUNT = {
    "type": "function",
    "function": {"name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}},
}


def test_a_schema_may_be_a_dict_wherever_python_code_gives_one():
    class Given(BaseTool):
        """Its constructor gets the schema."""

    class Own(BaseTool):
        def get_openai_tool_schema(self):
            return COUNT

    class Late(Own):
        def __init__(self):
            self.name = "count"

    for tool in (Given({}, COUNT), Own({}), Late(), function_tool(tool_schema=COUNT)(len)):
        tools = ToolSet([tool])
        assert tools.names == ["count"] and tools.schemas() == [COUNT], tool


def test_what_is_no_schema_is_named_with_its_tool():
    class Tool(BaseTool):
        """Its constructor gets the schema."""

    class Own(Tool):
        def __init__(self):
            self.name = "own"

        def get_openai_tool_schema(self):
            return {"name": "own"}

    class Nothing(Tool):
        def __init__(self):
            self.name = "nothing"

    says = "is not an OpenAI tool schema: function: Field required. Write {type: function"
    for make, where in (
        (lambda: Tool({}, {"name": "x"}), "tool_schema of Tool "),
        (lambda: ToolSet([Own()]), "Own: what get_openai_tool_schema() returns "),
        (lambda: function_tool(tool_schema={"name": "x"})(len), "tool_schema of @function_tool builtins.len "),
    ):
        with pytest.raises(PluginError) as caught:
            make()
        assert str(caught.value).startswith(where + says), caught.value
    with pytest.raises(PluginError, match=r"Nothing: get_openai_tool_schema\(\) raised ValueError: .* no tool schema"):
        ToolSet([Nothing()])


@pytest.mark.parametrize("name", ["../../x<script>", "a b", "x" * 129, "f\n"])
def test_a_name_that_model_apis_refuse_is_refused(name):
    with pytest.raises(PluginError, match=r"is not 1 to 128 letters, digits, '_', '-' or '\.'"):
        ToolSet([Calculator({}, {"type": "function", "function": {**COUNT["function"], "name": name}})])


@pytest.mark.parametrize("name", ["search.web-v2_1", "x" * 128, "查询"])
def test_names_in_use_are_taken(name):
    assert ToolSet([Calculator({}, {"type": "function", "function": {**COUNT["function"], "name": name}})]).names
