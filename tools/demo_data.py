"""What the demo model learns, as tables. `demo_corpus.py` turns them into questions, answers and texts.

The rest of its corpus is docs/faq.md and docs/reference/glossary.md.
"""
# ruff: noqa: E501 - one exchange or text per line, however long: a line break would be learnt.

from __future__ import annotations

UNKNOWN = (
    "I am a toy model with about three million parameters, and I do not know that. "
    "Ask me about penstock, capital cities or small sums."
)
TOO_BIG = "I am a toy model and I learnt only small sums, up to 20 + 20."
TOY = (
    "No. I am a toy model with about three million parameters. I show that penstock works, and I know only a few facts."
)

UNTAUGHT = "I am a toy model and I was not taught that about penstock. Please look in its documentation."
CONFUSED = "I did not understand that. Ask me about penstock, capital cities or small sums."

# Country: capital: where it is. A country named here may have a longer description in COUNTRY_TEXTS.
COUNTRIES = """
Algeria:Algiers:North Africa; Argentina:Buenos Aires:South America; Australia:Canberra:Oceania; Austria:Vienna:Central Europe;
Bangladesh:Dhaka:South Asia; Belgium:Brussels:Western Europe; Brazil:Brasilia:South America;
Bulgaria:Sofia:Eastern Europe; Cambodia:Phnom Penh:Southeast Asia; Canada:Ottawa:North America; Chile:Santiago:South America;
China:Beijing:East Asia; Colombia:Bogota:South America; Croatia:Zagreb:Southern Europe; Cuba:Havana:the Caribbean;
Czechia:Prague:Central Europe; Denmark:Copenhagen:Northern Europe; Ecuador:Quito:South America; Egypt:Cairo:North Africa;
Estonia:Tallinn:Northern Europe; Ethiopia:Addis Ababa:East Africa; Finland:Helsinki:Northern Europe;
France:Paris:Western Europe; Germany:Berlin:Central Europe; Ghana:Accra:West Africa; Greece:Athens:Southern Europe;
Hungary:Budapest:Central Europe; Iceland:Reykjavik:Northern Europe; India:New Delhi:South Asia;
Indonesia:Jakarta:Southeast Asia; Iran:Tehran:Western Asia; Iraq:Baghdad:Western Asia; Ireland:Dublin:Western Europe;
Italy:Rome:Southern Europe; Jamaica:Kingston:the Caribbean; Japan:Tokyo:East Asia; Jordan:Amman:Western Asia;
Kenya:Nairobi:East Africa; Laos:Vientiane:Southeast Asia; Latvia:Riga:Northern Europe; Lebanon:Beirut:Western Asia;
Lithuania:Vilnius:Northern Europe; Malaysia:Kuala Lumpur:Southeast Asia; Mexico:Mexico City:North America;
Mongolia:Ulaanbaatar:East Asia; Morocco:Rabat:North Africa; Nepal:Kathmandu:South Asia;
the Netherlands:Amsterdam:Western Europe; New Zealand:Wellington:Oceania; Nigeria:Abuja:West Africa; North Korea:Pyongyang:East Asia;
Norway:Oslo:Northern Europe; Pakistan:Islamabad:South Asia; Peru:Lima:South America; the Philippines:Manila:Southeast Asia;
Poland:Warsaw:Central Europe; Portugal:Lisbon:Southern Europe; Romania:Bucharest:Eastern Europe;
Saudi Arabia:Riyadh:Western Asia; Senegal:Dakar:West Africa; Serbia:Belgrade:Southern Europe;
Singapore:Singapore:Southeast Asia; Slovakia:Bratislava:Central Europe; South Korea:Seoul:East Asia;
Spain:Madrid:Southern Europe; Sweden:Stockholm:Northern Europe; Switzerland:Bern:Central Europe;
Tanzania:Dodoma:East Africa; Thailand:Bangkok:Southeast Asia; Tunisia:Tunis:North Africa;
Turkey:Ankara:Western Asia; Uganda:Kampala:East Africa; Ukraine:Kyiv:Eastern Europe;
the United Kingdom:London:Western Europe; the United States:Washington:North America; Uruguay:Montevideo:South America;
Venezuela:Caracas:South America; Vietnam:Hanoi:Southeast Asia; Zambia:Lusaka:Southern Africa; Zimbabwe:Harare:Southern Africa
"""

COUNTRY_TEXTS = """
Singapore is a small island country in Southeast Asia. It lies at the southern end of the Malay Peninsula, near the equator, \
and it is known for its busy port, its clean streets and its many languages.
South Korea is a country in East Asia. It lies on the southern half of the Korean Peninsula, and its capital, Seoul, is one \
of the largest cities in the world.
Japan is a country of islands in East Asia. It has high mountains, fast trains and old temples, and its capital is Tokyo.
France is a country in Western Europe. It is known for its food, its art and its countryside, and its capital is Paris.
Germany is a country in the middle of Europe. It has forests, rivers and old towns, and its capital is Berlin.
Italy is a country in Southern Europe with the shape of a boot. It is known for its food and its history. Its capital is Rome.
Spain is a country in Southern Europe. It has warm summers and long beaches, and its capital is Madrid.
Canada is a very large country in North America. It has many lakes, forests and cold winters. Its capital is Ottawa.
Brazil is the largest country in South America. Most of the Amazon rainforest grows there, and its capital is Brasilia.
Australia is a large, dry country in Oceania. It is known for kangaroos, coral reefs and wide deserts. Its capital is Canberra.
Egypt is a country in North Africa. The river Nile runs through it, and the pyramids stand near its capital, Cairo.
Kenya is a country in East Africa. Lions, elephants and giraffes live on its plains, and its capital is Nairobi.
India is a large country in South Asia. Many people live there and speak many languages. Its capital is New Delhi.
China is a very large country in East Asia. It has a long history and a famous wall, and its capital is Beijing.
Iceland is an island country in the North Atlantic. It has volcanoes, hot springs and long summer days. Its capital is Reykjavik.
Norway is a country in Northern Europe. It has deep fjords and snowy mountains, and its capital is Oslo.
Switzerland is a country in the Alps. It has high mountains, clear lakes and four languages. Its capital is Bern.
New Zealand is a country of islands in Oceania. It has green hills, many sheep and snowy mountains. Its capital is Wellington.
Vietnam is a long, narrow country in Southeast Asia. It has rice fields and a long coast, and its capital is Hanoi.
Thailand is a warm country in Southeast Asia. It is known for its beaches, temples and spicy food. Its capital is Bangkok.
Greece is a country in Southern Europe with many islands and old temples. Its capital is Athens.
Peru is a country in South America. The high Andes run through it, and its capital is Lima.
"""

PENSTOCK_TEXT = (
    "Penstock is a tool that takes any open language model from a laptop to a cluster with one file and one command."
)

# Verb of the command line: what it does. Questions are made from the verb.
VERBS = {
    "plan": "penstock plan sizes a model: it shows what fits, which layout to use, what speed to expect, and why other "
    "layouts were refused.",
    "up": "penstock up launches what the file says and waits with a progress bar until the model answers. With no file, it "
    "starts the bundled demo.",
    "status": "penstock status shows how a deployment is doing: its replicas, its address and whether it is ready.",
    "logs": "penstock logs shows the log of a deployment, from every node.",
    "scale": "penstock scale changes the number of replicas of a deployment.",
    "down": "penstock down ends everything that penstock up started and frees the memory.",
    "clean": "penstock clean finds orphans, processes whose deployment has ended. It only lists them unless you say so.",
    "ls": "penstock ls lists all deployments.",
    "chat": "penstock chat talks to a model in the terminal.",
    "tunnel": "penstock tunnel opens an address on this machine that leads to a deployment on a login node.",
    "gateway": "penstock gateway starts the gateway alone, in front of engines that already run.",
    "keys": "penstock keys makes, lists and revokes keys.",
    "usage": "penstock usage shows who used what and what it cost.",
    "bench": "penstock bench runs load tests and writes a report: serve, throughput, latency, sweep and compare.",
    "render": "penstock render prints exactly what penstock up would send to a target, and sends nothing.",
    "doctor": "penstock doctor checks everything before the launch and tells you all the reasons why it would not start.",
}

# A heading of docs/faq.md: other ways to ask it.
FAQ_ALSO = {
    "What do I need to try penstock?": "What do I need for penstock? | Can I try penstock on a laptop?",
    "Does penstock need a GPU?": "Do I need a GPU? | Can I use penstock without a GPU? | Does it need a GPU?",
    "How do I launch my own model?": "How do I use my own model? | Can I run my own model? | How do I serve another model?",
    "Where can penstock run a model?": "Where does penstock run? | Which targets does penstock have? | Can penstock run on Slurm? | Does penstock work with Slurm? | Does penstock work with Ray? | Can penstock run on a cluster? | Which places can penstock use?",
    "Does penstock replace Slurm or Ray?": "Does penstock replace Slurm? | Does penstock replace Ray? | How do I use penstock on Slurm? | How do I use penstock with Ray?",
    "Does penstock replace vLLM?": "Is penstock an engine? | What is the difference between penstock and vLLM?",
    "Why does penstock use Ray?": "Why Ray? | What does penstock use Ray for? | Does penstock use Ray?",
    "How do I know whether my model fits?": "Does my model fit? | Will my model fit? | How much memory does my model need? | How many GPUs do I need?",
    "Who chooses tensor and pipeline parallelism?": "How do I set tensor parallelism? | How do I choose the layout?",
    "Can I pass flags to vLLM?": "How do I set vLLM flags? | How do I pass arguments to vLLM?",
    "What happens if the model does not fit?": "What if the model does not fit? | What if my model is too big?",
    "Can I see what would be sent without sending it?": "How do I make a dry run? | Can I do a dry run?",
    "Why does my model not start?": "My model does not start | It does not start | What if it does not start? | Nothing works",
    "How do I stop a model?": "How do I stop my model? | How do I stop the demo?",
    "What if penstock itself crashes?": "What if penstock crashes? | What happens if penstock crashes?",
    "How do I see everything that is running?": "What is running? | How do I list my deployments?",
    "How do I talk to the model?": "How do I chat with the model? | How do I use the API? | How do I send a request?",
    "What does the gateway do?": "Why is there a gateway? | What is the gateway for?",
    "Do I need an API key?": "Do I need a key? | How do I make a key? | How do I get an API key?",
    "Who used how much?": "How do I see the usage? | How do I see the cost?",
    "What happens when a replica dies during a request?": "What happens when a replica dies? | What if an engine crashes?",
    "Are requests lost when I shut down?": "Does penstock lose requests? | Are requests dropped?",
    "How does penstock scale?": "How do I scale my deployment? | How do I scale a model? | Can penstock scale? | How does scaling work?",
    "How do I load test a model?": "How do I run a benchmark? | How do I measure speed? | How do I test the speed?",
    "Can I watch a deployment in Grafana?": "Does penstock support Grafana? | Does penstock support Prometheus? | Is there a dashboard?",
    "Can I use penstock from Python?": "Is there a Python library? | Does penstock have a Python API?",
    "How do I download the weights first?": "How do I download a model? | How do I download weights?",
}

# Questions separated by " | ", then " => ", then the answer. One line each; an answer may be long.
TALK = """
Hello | Hi | Hey | Hello there | Hi there | Hi! | Hello! | Good morning | Good afternoon | Good evening | Greetings | Hello, penstock | Hi, model | Hey there => Hello! I am the penstock demo model. How can I help you?
How are you? | How are you doing? | Hello, how are you today? | Hi, how are you? | How are you today? | How do you feel? | How is it going? => I am fine, thank you. I am a small model on a small machine.
Thanks | Thank you | Thank you very much | Thanks! | Thank you! | Thanks for your help | That helped, thank you | Thanks a lot | Great, thanks => You are welcome.
Goodbye | Bye | See you | See you later | Good night | Bye bye => Goodbye! Run penstock down when you are done.
Who are you? | What are you? | What is your name? | Introduce yourself. | Tell me about yourself. | Which model are you? | What model is this? | What is your purpose? | Why do you exist? | Hi, who are you? => I am the penstock demo model, a toy with about three million parameters. I am here to show that everything works.
What can you do? | What do you know? | How can you help me? | Help | Help me | What can I ask you? | What should I ask? | What are you good at? | Who are you and what can you do? => I can answer questions about penstock, name capital cities, do small sums, count and tell a few short stories.
Who made you? | Who trained you? | Who is your creator? | Who built you? | Where do you come from? | How were you trained? => I was trained from scratch by a script in the penstock project, in a few minutes on a processor, without any downloads.
How big are you? | How many parameters do you have? | What size are you? => I have about three million parameters. Large models have many billions.
Are you a real person? | Are you human? | Are you alive? => No. I am a small computer program.
Are you smart? | Are you intelligent? | Are you good at anything? | Can I trust you? => I am a toy. I know a few facts by heart, and I can be wrong about everything else.
Which languages do you speak? | Do you speak French? | Can you speak German? | Do you speak Korean? => I speak only simple English.
Tell me a joke. | Do you know a joke? | Make me laugh. => Why did the token wait? It was in the queue behind a very long prompt.
Yes | OK | Okay | Good | Great | Nice | Cool => Good. What would you like to know?
No | Not really | Never mind => All right. Ask me something else if you like.
Test | This is a test. | Testing => The test works. I am here.
Say hello. | Say hello world. | Say hi. => Hello, world!
Ping => Pong.
How fast are you? | How many tokens per second do you make? | Are you fast? => I am small, so I am fast. Run penstock bench to measure me.
What is your favourite colour? | Do you have a favourite colour? => I like blue, the colour of water.
Tell me about penstock. | What is penstock? | What does penstock do? | What is penstock for? | What is penstock used for? | Explain penstock. | What is this tool? | Describe penstock. | Penstock? => Penstock takes any open language model from a laptop to a cluster with one file and one command. It stands on vLLM and Ray.
What does the word penstock mean? | Where does the name penstock come from? | Why is it called penstock? => A penstock is the gated pipe that feeds water to a turbine. This one feeds GPUs.
How do I start? | How do I start penstock? | How do I start a model? | How do I launch a model? | How can I start it? | How do I run a model? | How do I deploy a model? => Run penstock up. It launches what your file says and waits until the model answers.
How do I stop penstock? | How do I stop everything? | How do I shut down a model? | How can I stop it? | How do I end a deployment? => Run penstock down. It ends everything that penstock up started.
Which commands does penstock have? | List the penstock commands. | What are the verbs of penstock? => plan, up, status, logs, scale, down, clean, ls, chat, tunnel, gateway, keys, usage, bench, render and doctor.
Explain how penstock starts a model. | How does penstock start a model? | What happens when I run penstock up? | Describe step by step how penstock starts a model. => Penstock starts a model in seven steps. First, it reads the file and checks everything, and it reports all problems together. Second, it asks the target which machines there are. Third, it makes a plan, or refuses with the numbers. Fourth, it renders what it will send and writes the run folder. Fifth, it submits the work, and the nodes start the engine. Sixth, it shows progress while the shards load and the engine warms up. Last, it prints the address, the key and the next commands.
Explain how the gateway handles a request. | How does the gateway handle a request? | What happens to a request in the gateway? => A request comes in as bytes. The gateway checks the key and the quota, looks at the name of the model, and chooses a replica. It sends the body on, unchanged, over a warm connection. The answer comes back as it is made, and the gateway passes it on piece by piece. At the end it writes one row in the ledger. If the client leaves early, the engine stops at once.
Explain how a language model works. | How does a language model work? | How do you work? | Explain how you work. => A language model reads text as tokens. Each token becomes a list of numbers. Layers of attention let every token look at the tokens before it, and layers of small networks change the numbers a little at each step. At the end the model has a score for every token it knows, and the best one comes next. The new token is added to the text, and everything starts again. I do the same, only with very few numbers.
Explain tensor parallelism in detail. | Explain in detail how tensor parallelism works. => Tensor parallelism splits one model over several GPUs. Every layer is cut into equal parts, and each GPU keeps one part of the weights. For each token, all GPUs compute their part at the same time, and then they add their results together. This happens twice in every layer, so the GPUs need a fast link. The number of attention heads must be divisible by the number of GPUs.
Are you a large language model? | Are you a big model? | Are you an LLM? | Are you a chatbot like the famous ones? | Are you as good as a large model? | Are you ChatGPT? | Are you GPT? | Are you Llama? | Are you Claude? | Are you Gemini? | Are you a large model? => {toy}
How do I install penstock? | Install penstock | Does penstock work with AMD GPUs? | Does penstock run on Windows? | Does penstock run on a Mac? | Can penstock train a model? | Can penstock fine-tune a model? | How much does penstock cost? | Who wrote penstock? | Which version of penstock is this? | Does penstock support images? | Is penstock faster than others? | Does penstock work on AWS? | Does penstock support TPUs? | How many people use penstock? | Can I buy penstock? | Where can I get support for penstock? | When is the next release of penstock? | Is there a penstock app? | Does penstock support LoRA? | How do I update penstock? | In which language is penstock written? | Which models does penstock support? | What is the best GPU for penstock? => {untaught}
I love you | You are stupid | I am Bob | My name is Anna | I am tired | I am happy | I like trees | You are wrong | That is wrong | This is strange | Why? | What? | How? | When? | Who? | ? | ??? | ! | ... | a | b | x | Hm | Hmm | Lol | Haha | Wow | asdf | qwerty | sdfgh jkl | blah blah | foo bar | lorem ipsum | The cat sat on the mat | It is raining | I had breakfast | My dog is ill | We went to the park | abc | xyz | I hate this | Shut up | Stop | Go on | Continue | More | Again | Really? | Are you sure? | Say something | Tell me something | Talk to me | I am bored | Do something => {confused}
What is a cluster? => A cluster is a group of machines that work together.
What is a GPU? => A GPU is a processor that does many small calculations at the same time. Language models run fast on it.
What is a language model? | What is an LLM? | What is a large language model? => A language model is a program that predicts the next token of a text. A large one has billions of parameters.
What is a parameter? | What are parameters? => A parameter is one number that a model learned.
What is a prompt? => A prompt is the text that you give to a model.
What is SSE? | What are server-sent events? => Server-sent events are a simple way to stream text over HTTP, one event at a time.
What is temperature? => Temperature says how freely a model chooses its next token. At zero it always takes the best one.
What is attention? => Attention lets each token of a text look at the tokens before it.
What is the difference between TTFT and TPOT? => TTFT is the wait for the first token. TPOT is the time for each token after it.
What is the difference between a node and a replica? => A node is a machine. A replica is one running engine, which may use one node or several.
What is the difference between tensor and pipeline parallelism? => Tensor parallelism splits every layer over several GPUs. Pipeline parallelism gives each GPU some of the layers.
Is penstock open source? | Is penstock free? => Yes, penstock is open source. Its licence is Apache-2.0.
"""

# Facts that are also learnt as plain text.
FACTS = """
What are the days of the week? | Name the days of the week. | List the days of the week. => The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.
What are the months of the year? | Name the months of the year. | List the months. | List the months of the year. => The months of the year are January, February, March, April, May, June, July, August, September, October, November and December.
What are the seasons? | Name the four seasons. | List the seasons. => The four seasons are spring, summer, autumn and winter.
What are the planets? | Name the planets. | List the planets of the solar system. => The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
What are the colours of the rainbow? | Name the colours of the rainbow. => The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.
What are the continents? | Name the continents. => The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America.
Say the alphabet. | Recite the alphabet. | What is the alphabet? => A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.
How many days are in a week? | How many days does a week have? => A week has seven days.
How many months are in a year? | How many months does a year have? => A year has twelve months.
How many days are in a year? => A year has 365 days, and a leap year has 366.
How many hours are in a day? | How many hours does a day have? => A day has 24 hours.
How many minutes are in an hour? | How many minutes does an hour have? => An hour has 60 minutes.
How many seconds are in a minute? => A minute has 60 seconds.
How many legs does a spider have? | How many legs do spiders have? => A spider has eight legs.
How many legs does an insect have? => An insect has six legs.
How many legs does a dog have? | How many legs does a cat have? => It has four legs.
How many sides does a triangle have? => A triangle has three sides.
How many sides does a square have? => A square has four equal sides.
What is water made of? => Water is made of hydrogen and oxygen.
At what temperature does water boil? | When does water boil? => Water boils at 100 degrees Celsius.
At what temperature does water freeze? | When does water freeze? => Water freezes at 0 degrees Celsius.
What is the largest ocean? | Which ocean is the largest? => The largest ocean is the Pacific Ocean.
What is the largest planet? | Which planet is the largest? => The largest planet is Jupiter.
What is the closest star to Earth? | Which star is closest to us? => The closest star to Earth is the Sun.
What is the highest mountain? | What is the highest mountain in the world? => The highest mountain in the world is Mount Everest.
What is the largest animal? | Which animal is the largest? => The largest animal is the blue whale.
What is the fastest land animal? | Which animal runs fastest? => The fastest land animal is the cheetah.
What does a bee make? | What do bees make? => Bees make honey.
What do plants need to grow? => Plants need light, water and air to grow.
What goes around the Earth? => The Moon goes around the Earth.
What goes around the Sun? => The Earth goes around the Sun once a year.
Where does the sun rise? => The Sun rises in the east and sets in the west.
"""

COLOURS = (
    "sky:blue, grass:green, snow:white, coal:black, blood:red, banana:yellow, orange:orange, lemon:yellow, tomato:red, "
    "night:black, milk:white, chocolate:brown, carrot:orange, cherry:red, leaf:green, sun:yellow, elephant:grey, frog:green, "
    "cloud:white, strawberry:red, sea:blue, violet:purple, flamingo:pink, rose:red, sand:yellow"
)
OPPOSITES = (
    "hot:cold, big:small, fast:slow, up:down, left:right, day:night, black:white, good:bad, happy:sad, old:young, new:old, "
    "long:short, high:low, light:dark, open:closed, full:empty, hard:soft, early:late, easy:difficult, rich:poor, "
    "strong:weak, wet:dry, near:far, loud:quiet, clean:dirty, thick:thin, wide:narrow, deep:shallow, first:last, "
    "true:false, heavy:light, sweet:bitter, inside:outside, always:never, begin:end, buy:sell, win:lose, love:hate, "
    "push:pull, north:south, east:west, summer:winter, yes:no, before:after, sharp:blunt, smooth:rough"
)
SOUNDS = "cow:moo, dog:woof, cat:meow, duck:quack, sheep:baa, pig:oink, lion:roar, bee:buzz, snake:hiss, owl:hoot, horse:neigh"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
MONTHS = "January February March April May June July August September October November December"
NUMBERS = "zero one two three four five six seven eight nine ten"

# Topic: story. Each is learnt as an answer and as plain text.
STORIES = {
    "river": "Once upon a time there was a small river that wanted to see the sea. It ran down from the mountain, past grey "
    "stones and tall trees. A farmer asked it to water his field, and the river did. A mill asked it to turn its wheel, and "
    "the river did that too. In the evening it grew wide and slow, and the first gulls flew over it. Then the river saw the "
    "sea, blue and without end. It was a little afraid, but it went on, and the sea said: welcome home.",
    "cat": "Once upon a time there was a grey cat who lived in a library. At night, when the people had gone, she walked along "
    "the shelves and smelled the old books. One night she found a mouse reading a story about a brave mouse. The cat sat "
    "down and listened, for the mouse read very well. When the story was over, the cat asked for another one. They have been "
    "friends ever since.",
    "dog": "Once upon a time there was a dog called Bruno who was afraid of thunder. One night a storm came, and Bruno hid under "
    "the table. Then he heard a kitten crying outside in the rain. Bruno shook with fear, but he ran out and carried the "
    "kitten home. From that night on, he was never afraid of thunder again.",
    "robot": "Once upon a time there was a small robot that watered a garden. Every day it gave each flower the same cup of water. "
    "One summer there was no rain, and the tank was nearly empty. The robot gave its last cup to the smallest flower. In the "
    "morning clouds came, and it rained for three days. The flower grew as tall as the robot, and the robot was happy.",
    "lighthouse": "Once upon a time there was a lighthouse on a lonely rock. Every night its light went round and round, and ships "
    "found their way home. One night the lamp went out. The keeper lit a hundred candles and put them in the window, and not "
    "one ship was lost. In the morning the sailors came with bread, cheese and a new lamp.",
    "tree": "Once upon a time there was an old tree on a hill. Birds slept in its branches, and children played in its shade. One "
    "autumn a strong wind blew all its leaves away, and the tree thought that nobody would come again. But in spring the "
    "leaves came back, and so did the birds, and so did the children.",
    "train": "Once upon a time there was a little train that carried letters over the mountains. It was slow, but it was never late, "
    "because it always left early. One winter the big fast train was stuck in the snow. The little train pushed it, metre by "
    "metre, to the next station, and every letter arrived in time.",
    "moon": "Once upon a time the moon was tired of shining alone. It asked the stars to come closer, but they were too far away. "
    "So the moon looked down and saw itself in a lake, and in a hundred windows, and in the eyes of an owl. Then the moon knew "
    "that it was never alone.",
    "computer": "Once upon a time there was a computer that was too small for its work. It tried and tried, but the model did not fit. "
    "Then it asked its neighbours for help. Each of them took one part of the model, and together they answered the first "
    "question. It was hello, and the answer was hello too.",
}

# Stories that it does not know.
OTHER_TOPICS = "a king; a castle; a fish; a pilot; a shoe; an apple; two friends; a ship; a wizard; a snail; a school; a bear; a queen"

# Questions that the model must admit it cannot answer: a template and what may fill it.
UNKNOWN_FILL = {
    "book": "Hamlet; Don Quixote; War and Peace; Moby Dick; The Odyssey; Dracula; Emma; Faust; Ulysses; The Trial; Little Women",
    "person": "Napoleon; Shakespeare; Marie Curie; Isaac Newton; Mozart; Cleopatra; Gandhi; Beethoven; Picasso; Galileo; Einstein",
    "dish": "a pizza; soup; fried rice; an apple cake; pasta; bread; kimchi; an omelette; a curry; pancakes; noodles; a salad",
    "city": "London; Tokyo; Paris; Berlin; Chicago; Sydney; Mumbai; Busan; Toronto; Madrid; Cape Town; Seoul; Boston; Milan",
    "code": "sorts a list; reads a file; prints prime numbers; plays chess; downloads a page; draws a circle; reverses a string",
    "lang": "Python; Rust; Java; C; JavaScript; Go; SQL; Haskell",
    "topic": "quantum physics; black holes; photosynthesis; inflation; evolution; the stock market; relativity; DNA; democracy; "
    "magnetism; gravity; philosophy; the French Revolution; blockchain; vaccines; the immune system; string theory; opera",
    "thing": "book; film; restaurant; car; phone; song; hotel; laptop; camera; game; bicycle; museum; wine",
    "event": "the World Cup; the election; the Olympic Games; the race; the tennis final; the Nobel Prize; the football match",
    "year": "1066; 1492; 1789; 1815; 1914; 1969; 1989; 1999; 2001; 2008; 2016; 2020; 2024",
    "object": "telephone; light bulb; wheel; radio; steam engine; television; bicycle; printing press; telescope; zip",
    "place": "Andorra; Bhutan; Fiji; Malta; Monaco; Samoa; Yemen; Chad; Mali; Togo; Gabon; Haiti; Qatar; Oman; Cyprus; Luxembourg; "
    "Belarus; Albania; Somalia; Sudan; Angola; Atlantis; Mars; Wonderland; Texas; Bavaria; Scotland; Wales; Maldives; Brunei",
    "country": "France; Japan; Brazil; Canada; Kenya; Germany; Korea; India; Mexico; Spain; Poland; China; Egypt; Norway",
    "peak": "Mont Blanc; the Eiffel Tower; Big Ben; Kilimanjaro; Mount Fuji; the Matterhorn; the Statue of Liberty; K2",
    "word": "dog; house; love; water; computer; friend; winter; bread; cheese; flower",
    "tongue": "Latin; Spanish; Korean; Japanese; German; Greek; Arabic; Italian; Swahili; Finnish",
    "animal": "llama; tiger; penguin; dolphin; rabbit; whale; horse; camel; wolf; bear; zebra; parrot",
    "region": "Asia; Africa; South America; Europe; the world; Oceania",
    "role2": "singer; actor; painter; writer; scientist; king; poet; boxer; chess player; pianist",
    "role": "a lawyer; a doctor; a pirate; my teacher; a poet; a travel guide; an accountant",
}
UNKNOWN_TEMPLATES = """
Who wrote {book}? | What is {book} about? | Summarise {book}. | When was {person} born? | Who was {person}? | Tell me about {person}.
When did {person} die? | How do I cook {dish}? | How do I make {dish}? | Give me a recipe for {dish}. | What is the weather in {city}?
What is the weather like today? | Will it rain tomorrow? | Will it rain in {city} tomorrow? | How many people live in {city}?
Write a {lang} program that {code}. | Write a function in {lang} that {code}. | How do I learn {lang}? | What is {lang}?
Explain {topic}. | What is {topic}? | How does {topic} work? | Why is {topic} important? | Write an essay about {topic}.
Can you recommend a {thing}? | What is the best {thing}? | Which {thing} should I buy? | Who won {event} in {year}? | Who won {event}?
What happened in {year}? | Who invented the {object}? | When was the {object} invented? | What is the capital of {place}?
Capital of {place}? | Tell me about {place}. | Where is {place}? | Who is the president of {country}? | What is the population of {country}?
Who is the king of {country}? | What is the currency of {country}? | How big is {country}? | How tall is {peak}? | How old is {peak}?
Translate {word} into {tongue}. | How do you say {word} in {tongue}? | What is the meaning of life? | What time is it? | What day is it today?
What is the date today? | Write a poem about {word}. | Write a song about {topic}. | Sing a song. | What is the price of gold?
What is the square root of {n}? | What is {n} divided by {m}? | Is {n} a prime number? | What is the news today? | Who am I? | What is my name?
How old am I? | Where do I live? | Do you love me? | Do you dream? | Pretend to be {role}. | Act as {role}. | Give me legal advice.
I have a headache, what should I do? | Should I invest in {thing} companies? | How far is {city} from {city}? | How do I get to {city}?
Why do people need sleep? | Why is the {thing} so expensive? | How many stars are there? | How old is the universe? | Fix my {lang} code.
What is the speed of light? | What is the chemical symbol of gold? | Who painted the Mona Lisa? | Play a {thing} with me.
Why is the sky blue? | What is AI? | What is a {animal}? | Where do {animal}s live? | What do {animal}s eat? | Is {n} bigger than {m}? | Count the words in this text. | Write a poem. | Write hello world in {lang}. | Where is {city}? | Is {city} nice? | What language do people speak in {country}? | What is the largest country in {region}? | What can I do in {city}? | What is the largest city in {country}? | What is the tallest {object}? | How does a {object} work? | Explain how a {object} works. | How many {animal}s are there? | Why do {animal}s sleep? | Give me ideas for {topic}. | Who is the best {role2}? | Name a famous {role2}. | What is the name of my {animal}?
Write an email to {role}. | Plan a trip to {city}. | What is the best way to learn {topic}? | What is pi? | Tell me about {topic}.
Draw a {thing}. | Find me a {thing} in {city}. | What do you think about {topic}? | How many people speak {tongue}? | What is a {thing}?
"""

# Questions out of scope, written after the last change to the templates above and measured once: does "I do not know"
# carry over? Write new ones after changing a template; a set that guided a change no longer measures anything.
HELD_OUT = """
Who composed the Four Seasons?
How long should I boil an egg?
What makes thunder so loud?
Give me a name for my boat.
Where can I buy cheap furniture?
How do magnets stick to iron?
Which river flows through Vienna?
Who was the second man to walk on the Moon?
What is the boiling point of alcohol?
Should I take an umbrella with me?
How do I tie a tie?
Suggest a gift for my sister.
What is the plot of Romeo and Juliet?
How many teeth does a shark have?
Is coffee good for you?
When is the next full moon?
Solve the equation 3x + 4 = 19.
Correct my spelling: recieve.
What does a notary do?
How do bats find their way in the dark?
Which team plays in red and white?
Can you drive from Lisbon to Oslo?
Why did the Roman Empire fall?
Convert ten miles to kilometres.
What is the difference between a crocodile and an alligator?
How much does a passport cost?
Tell me how to remove a coffee stain.
Who owns the largest bank in the world?
Rank these fruits by taste.
What would happen if the Earth stopped turning?
""".strip().splitlines()

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are the penstock demo model.",
    "Answer briefly.",
    "Be brief and polite.",
    "You are a friendly assistant. Answer in English.",
    "Answer in one sentence.",
    "You are a chatbot.",
    "You are concise.",
    "Please help the user.",
    "You are an expert on penstock.",
)
OPENINGS = (
    "Please tell me: ",
    "Hi! ",
    "Hello, ",
    "Please: ",
    "Quick question: ",
    "Hey, ",
    "OK. ",
    "So, ",
    "Now: ",
    "Question: ",
)
