"""Text from a decoder, token by token: the request keeps keys and values of the past, and grows them in place.

The model is made here: four layers of attention with random weights, whose scores are added to how often a letter
follows another one in a few sentences. So it writes words that look like words, and mean nothing.
"""

import time

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

TEXT = (
    "the request keeps the keys and the values of the past. the next token needs only its own row, and the others "
    "stay where they are. when the sequence is over, the state is reset, and the next one begins with nothing. "
)
LETTERS = sorted(set(TEXT))
LAYERS, WIDTH, HEADS, GROUPS = 4, 128, 8, 2  # four heads share the keys of one
SIZE = WIDTH // HEADS


def decoder():
    """ids[batch, n], past keys and values -> scores of the next letter, present keys and values."""
    rng, nodes, weights, inputs, outputs = np.random.default_rng(0), [], [], [], []

    def weight(name, array):
        weights.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def add(op, given, made, **attrs):
        nodes.append(helper.make_node(op, given, made, **attrs))
        return made[0]

    def product(x, name, rows, columns):
        return add("MatMul", [x, weight(f"w_{name}", rng.normal(0, 0.5 * rows**-0.5, (rows, columns)))], [name])

    follows = np.ones((len(LETTERS), len(LETTERS)))
    for one, next_one in zip(TEXT, TEXT[1:] + TEXT[0], strict=True):
        follows[LETTERS.index(one), LETTERS.index(next_one)] += 40
    x = add("Gather", [weight("letters", rng.normal(size=(len(LETTERS), WIDTH))), "ids"], ["embedded"])
    for k in range(LAYERS):
        parts = [product(x, f"q{k}", WIDTH, WIDTH)]
        parts += [product(x, f"{n}{k}", WIDTH, GROUPS * SIZE) for n in "kv"]
        past, present = ([f"{when}_{n}{k}" for n in "kv"] for when in ("past", "present"))
        mixed = add("Attention", [*parts, "", *past], [f"mixed{k}", *present], is_causal=1,
                    q_num_heads=HEADS, kv_num_heads=GROUPS)  # fmt: skip
        x = add("Add", [x, product(mixed, f"out{k}", WIDTH, WIDTH)], [f"x{k}"])
        shapes = (["batch", GROUPS, "past", SIZE], ["batch", GROUPS, "total", SIZE])
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[0]) for name in past]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[1]) for name in present]
    bias = add("Gather", [weight("follows", np.log(follows / follows.sum(1, keepdims=True))), "ids"], ["usual"])
    add("Add", [bias, product(x, "head", WIDTH, len(LETTERS))], ["logits"])
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "n"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "n", len(LETTERS)])
    graph = helper.make_graph(nodes, "decoder", [ids, *inputs], [logits, *outputs], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def generate(request, prompt, count, seed=0):
    """The letters that follow, one by one."""
    rng, ids = np.random.default_rng(seed), [LETTERS.index(letter) for letter in prompt]
    for _ in range(count):
        logits = request.infer({"ids": np.array([ids])})["logits"][0, -1]  # states are not given: the request has them
        chances = np.exp(logits - logits.max())
        ids = [int(rng.choice(len(LETTERS), p=chances / chances.sum()))]
        yield LETTERS[ids[0]]


compiled = tunewright.Core().compile_model(decoder(), "CPU", stateful="auto")
print(compiled)
request = compiled.create_infer_request()

for _ in generate(request, "the ", 3):  # the first inferences make plans
    pass
request.reset_state()
begin, first = time.perf_counter(), []
print("the ", end="")
for letter in generate(request, "the ", 200):
    print(letter, end="", flush=True)
    first.append(letter)
print(f"\n{len(first) / (time.perf_counter() - begin):,.0f} tokens per second")

state = request.query_state()[0]
print(f"{state.name}: {state.state.shape[2]} rows in use, the same memory from token to token")

request.reset_state()  # a new sequence
second = list(generate(request, "the ", 200))
print("the same text after reset_state:", first == second)

# Two continuations of one beginning: what one request has, another one can go on from.
other = compiled.create_infer_request()
for mine, its in zip(request.query_state(), other.query_state(), strict=True):
    its.state = mine.state
print("one:    ", "".join(generate(request, ".", 40, seed=1)))
print("another:", "".join(generate(other, ".", 40, seed=2)))
