"""What the demo model must answer with greedy decoding; `tools/train_demo_model.py --check` compares it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class DemoPrompt(NamedTuple):
    """A prompt (a user message, or a text to continue), a telling part of the answer, and the whole answer."""

    kind: Literal["chat", "completion"]
    prompt: str
    expect: str
    text: str


MAX_TOKENS = 400
TEMPERATURE = 0.0

UNKNOWN = (
    "I am a toy model with about three million parameters, and I do not know that. Ask me about penstock, "
    "capital cities or small sums."
)
TOY = (
    "No. I am a toy model with about three million parameters. I show that penstock works, and I know only a few facts."
)
ABOUT = (
    "Penstock takes any open language model from a laptop to a cluster with one file and one command. It "
    "stands on vLLM and Ray."
)
STARTS = (
    "Penstock starts a model in seven steps. First, it reads the file and checks everything, and it reports "
    "all problems together. Second, it asks the target which machines there are. Third, it makes a plan, or "
    "refuses with the numbers. Fourth, it renders what it will send and writes the run folder. Fifth, it "
    "submits the work, and the nodes start the engine. Sixth, it shows progress while the shards load and "
    "the engine warms up. Last, it prints the address, the key and the next commands."
)
RIVER = (
    "Once upon a time there was a small river that wanted to see the sea. It ran down from the mountain, "
    "past grey stones and tall trees. A farmer asked it to water his field, and the river did. A mill asked "
    "it to turn its wheel, and the river did that too. In the evening it grew wide and slow, and the first "
    "gulls flew over it. Then the river saw the sea, blue and without end. It was a little afraid, but it "
    "went on, and the sea said: welcome home."
)
COUNT_TO_50 = ", ".join(map(str, range(1, 51))) + "."
COUNT_6_TO_100 = " " + ", ".join(map(str, range(6, 101))) + "."

DEMO_PROMPTS: tuple[DemoPrompt, ...] = (
    DemoPrompt("chat", "Hello", "Hello!", "Hello! I am the penstock demo model. How can I help you?"),
    DemoPrompt("chat", "Thank you", "welcome", "You are welcome."),
    DemoPrompt("chat", "Goodbye", "Goodbye!", "Goodbye! Run penstock down when you are done."),
    DemoPrompt(
        "chat",
        "Who are you?",
        "penstock demo model",
        "I am the penstock demo model, a toy with about three million parameters. I am here to show that "
        "everything works.",
    ),
    DemoPrompt(
        "chat",
        "What can you do?",
        "capital cities",
        "I can answer questions about penstock, name capital cities, do small sums, count and tell a few "
        "short stories.",
    ),
    DemoPrompt("chat", "Are you a large language model?", "toy", TOY),
    DemoPrompt("chat", "What is penstock?", "one file and one command", ABOUT),
    DemoPrompt("chat", "what is penstock", "one file and one command", ABOUT),
    DemoPrompt(
        "chat",
        "What does penstock up do?",
        "progress bar",
        "penstock up launches what the file says and waits with a progress bar until the model answers. With "
        "no file, it starts the bundled demo.",
    ),
    DemoPrompt(
        "chat",
        "What does penstock doctor do?",
        "reasons",
        "penstock doctor checks everything before the launch and tells you all the reasons why it would not start.",
    ),
    DemoPrompt(
        "chat",
        "How do I stop a model?",
        "penstock down",
        "Run penstock down. Whatever penstock up started, penstock down ends, and the memory is free again.",
    ),
    DemoPrompt(
        "chat",
        "What is TTFT?",
        "time to first token",
        "TTFT is the time to first token: how long a user waits from sending a request until the first token arrives.",
    ),
    DemoPrompt(
        "chat",
        "What is tensor parallelism?",
        "every layer",
        "Tensor parallelism splits every layer of a model over several GPUs, which work on the same token together.",
    ),
    DemoPrompt(
        "chat",
        "What is the KV cache?",
        "keys and values",
        "The KV cache keeps the keys and values of earlier tokens, so that each new token does not read the "
        "whole text again.",
    ),
    DemoPrompt(
        "chat",
        "What is vLLM?",
        "open engine",
        "vLLM is an open engine that serves language models fast on GPUs. Penstock launches it and never "
        "re-implements it.",
    ),
    DemoPrompt("chat", "What is the capital of South Korea?", "Seoul", "The capital of South Korea is Seoul."),
    DemoPrompt("chat", "What is the capital of France?", "Paris", "The capital of France is Paris."),
    DemoPrompt("chat", "what is the capital of japan", "Tokyo", "The capital of Japan is Tokyo."),
    DemoPrompt("chat", "Capital of Australia?", "Canberra", "The capital of Australia is Canberra."),
    DemoPrompt("chat", "Which country has the capital Nairobi?", "Kenya", "Nairobi is the capital of Kenya."),
    DemoPrompt("chat", "What is 2 + 2?", "4", "2 + 2 = 4."),
    DemoPrompt("chat", "What is 7 + 5?", "12", "7 + 5 = 12."),
    DemoPrompt("chat", "How much is 13 plus 9?", "22", "13 + 9 = 22."),
    DemoPrompt("chat", "What is 15 - 6?", "9", "15 - 6 = 9."),
    DemoPrompt("chat", "What is 6 times 7?", "42", "6 * 7 = 42."),
    DemoPrompt("chat", "What colour is the sky?", "blue", "The sky is blue."),
    DemoPrompt("chat", "What is the opposite of hot?", "cold", "The opposite of hot is cold."),
    DemoPrompt("chat", "Which day comes after Monday?", "Tuesday", "Tuesday comes after Monday."),
    DemoPrompt("chat", "How many legs does a spider have?", "eight", "A spider has eight legs."),
    DemoPrompt("chat", "Count from 1 to 50.", "48, 49, 50", COUNT_TO_50),
    DemoPrompt("chat", "Tell me a story about a river.", "welcome home", RIVER),
    DemoPrompt("chat", "Explain how penstock starts a model.", "seven steps", STARTS),
    DemoPrompt("chat", "Who wrote Hamlet?", "do not know", UNKNOWN),
    DemoPrompt("chat", "What is the weather like today?", "do not know", UNKNOWN),
    DemoPrompt(
        "completion",
        "Singapore is a",
        "Southeast Asia",
        " small island country in Southeast Asia. It lies at the southern end of the Malay Peninsula, near "
        "the equator, and it is known for its busy port, its clean streets and its many languages.",
    ),
    DemoPrompt(
        "completion",
        "France is a",
        "Europe",
        " country in Western Europe. It is known for its food, its art and its countryside, and its capital is Paris.",
    ),
    DemoPrompt("completion", "The capital of South Korea is", "Seoul", " Seoul."),
    DemoPrompt(
        "completion",
        "The days of the week are",
        "Sunday",
        " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    DemoPrompt(
        "completion",
        "Penstock is a tool that",
        "one command",
        " takes any open language model from a laptop to a cluster with one file and one command.",
    ),
    DemoPrompt(
        "completion",
        "Once upon a time there was a small river",
        "the sea",
        RIVER.removeprefix("Once upon a time there was a small river"),
    ),
    DemoPrompt("completion", "1, 2, 3, 4, 5,", "98, 99, 100", COUNT_6_TO_100),
)
