"""Other libraries' names of our keys: a table of data for each library, and the functions that the tables name.

A row is `alias | meaning | converter | why`, all on one line; what is empty at the end may be left out.

    data.max_response_length    | -> actor_rollout_ref.rollout.response_length
    x.tool_response_truncate_side | -> x.tool_response_keep | truncate_side | left keeps the head, ...
    data.return_raw_chat        | = true  | | rollouts always start from the messages
    critic.shuffle              | = any   | | the critic follows the actor's
    critic.megatron             | refused | | there is no Megatron

`->` is another name of our key. Its converter, a function of `converters.py`, turns the value into ours and raises
ValueError with the reason where the value has no counterpart; `why` is printed as a note, for a meaning that is not
quite the same. With `.*` on both sides everything below is renamed too. A row from one of our keys to itself is for
values: it is asked only for a value that our schema does not take, and its `why` is the reason of a bare ValueError.

`=` is a key whose value is fixed here, in JSON: accepted with one printed line where the value agrees (`any`: with
every value, because no result depends on it), refused with `why` otherwise. `refused` holds for everything below the
key too; the longest name counts.

`{a,b}` stands for two rows; the same group behind `->` takes the same word. `@name` is a text that the table's head
defines. `(switch)` marks a flag that takes no value.
"""
