"""What the demo model must answer with greedy decoding; `tools/train_demo_model.py --check` compares it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class DemoPrompt(NamedTuple):
    """A prompt (a user message, or a text to continue) and its whole answer."""

    kind: Literal["chat", "completion"]
    prompt: str
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
    DemoPrompt("chat", "Hello", "Hello! I am the penstock demo model. How can I help you?"),
    DemoPrompt("chat", "Thank you", "You are welcome."),
    DemoPrompt("chat", "Goodbye", "Goodbye! Run penstock down when you are done."),
    DemoPrompt(
        "chat",
        "Who are you?",
        "I am the penstock demo model, a toy with about three million parameters. I am here to show that "
        "everything works.",
    ),
    DemoPrompt(
        "chat",
        "What can you do?",
        "I can answer questions about penstock, name capital cities, do small sums, count and tell a few "
        "short stories.",
    ),
    DemoPrompt("chat", "Are you a large language model?", TOY),
    DemoPrompt("chat", "What is penstock?", ABOUT),
    DemoPrompt("chat", "what is penstock", ABOUT),
    DemoPrompt(
        "chat",
        "What does penstock up do?",
        "penstock up launches what the file says and waits with a progress bar until the model answers. With "
        "no file, it starts the bundled demo.",
    ),
    DemoPrompt(
        "chat",
        "What does penstock doctor do?",
        "penstock doctor checks everything before the launch and tells you all the reasons why it would not start.",
    ),
    DemoPrompt(
        "chat",
        "How do I stop a model?",
        "Run penstock down. Whatever penstock up started, penstock down ends, and the memory is free again.",
    ),
    DemoPrompt(
        "chat",
        "What is TTFT?",
        "TTFT is the time to first token: how long a user waits from sending a request until the first token arrives.",
    ),
    DemoPrompt(
        "chat",
        "What is tensor parallelism?",
        "Tensor parallelism splits every layer of a model over several GPUs, which work on the same token together.",
    ),
    DemoPrompt(
        "chat",
        "What is the KV cache?",
        "The KV cache keeps the keys and values of earlier tokens, so that each new token does not read the "
        "whole text again.",
    ),
    DemoPrompt(
        "chat",
        "What is vLLM?",
        "vLLM is an open engine that serves language models fast on GPUs. Penstock launches it and never "
        "re-implements it.",
    ),
    DemoPrompt("chat", "What is the capital of South Korea?", "The capital of South Korea is Seoul."),
    DemoPrompt("chat", "What is the capital of France?", "The capital of France is Paris."),
    DemoPrompt("chat", "what is the capital of japan", "The capital of Japan is Tokyo."),
    DemoPrompt("chat", "Capital of Australia?", "The capital of Australia is Canberra."),
    DemoPrompt("chat", "Which country has the capital Nairobi?", "Nairobi is the capital of Kenya."),
    DemoPrompt("chat", "What is 2 + 2?", "2 + 2 = 4."),
    DemoPrompt("chat", "What is 7 + 5?", "7 + 5 = 12."),
    DemoPrompt("chat", "How much is 13 plus 9?", "13 + 9 = 22."),
    DemoPrompt("chat", "What is 15 - 6?", "15 - 6 = 9."),
    DemoPrompt("chat", "What is 6 times 7?", "6 * 7 = 42."),
    DemoPrompt("chat", "What colour is the sky?", "The sky is blue."),
    DemoPrompt("chat", "What is the opposite of hot?", "The opposite of hot is cold."),
    DemoPrompt("chat", "Which day comes after Monday?", "Tuesday comes after Monday."),
    DemoPrompt("chat", "How many legs does a spider have?", "A spider has eight legs."),
    DemoPrompt("chat", "Count from 1 to 50.", COUNT_TO_50),
    DemoPrompt("chat", "Tell me a story about a river.", RIVER),
    DemoPrompt("chat", "Explain how penstock starts a model.", STARTS),
    DemoPrompt("chat", "Who wrote Hamlet?", UNKNOWN),
    DemoPrompt("chat", "What is the weather like today?", UNKNOWN),
    DemoPrompt(
        "completion",
        "Singapore is a",
        " small island country in Southeast Asia. It lies at the southern end of the Malay Peninsula, near "
        "the equator, and it is known for its busy port, its clean streets and its many languages.",
    ),
    DemoPrompt(
        "completion",
        "France is a",
        " country in Western Europe. It is known for its food, its art and its countryside, and its capital is Paris.",
    ),
    DemoPrompt("completion", "The capital of South Korea is", " Seoul."),
    DemoPrompt(
        "completion", "The days of the week are", " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."
    ),
    DemoPrompt(
        "completion",
        "Penstock is a tool that",
        " takes any open language model from a laptop to a cluster with one file and one command.",
    ),
    DemoPrompt(
        "completion",
        "Once upon a time there was a small river",
        RIVER.removeprefix("Once upon a time there was a small river"),
    ),
    DemoPrompt("completion", "1, 2, 3, 4, 5,", COUNT_6_TO_100),
)
