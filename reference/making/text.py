"""The text the vocabularies are trained on, written for this purpose, and the strings they are tested with."""

CORPUS = """\
The river runs slowly past the old mill, and the miller counts the sacks of grain.
In the morning the children walk to school; in the evening they walk home again.
There are seven boats in the harbour, three of them red, and one that never sails.
She said that she would write a letter, but the letter never came to the house.
Memory is a map of places, and a page is the smallest place that can be lent.
When a page is shared, two readers hold it; when both are done, it is returned.
def total(values): return sum(value for value in values if value > 0)
The year 2024 had 366 days, 52 weeks and 2 days, or 8784 hours in all.
Der Fluss fließt langsam an der alten Mühle vorbei. Où est la bibliothèque ?
"""

STRINGS = [
    "",
    " ",
    "Hello world",
    " Hello, world! How are you?",
    "I'm sure they'll say it's what we've done; I'd go, don't you're?",
    "IT'S WHAT WE'VE DONE, I'M SURE THEY'LL SAY; 'Tis O'Neill",
    "1 12 123 1234 12345 123456 1234567 12345678 123456789 1234567890",
    "3.14159, 1,000,000 and x2y3; v1.20.300",
    "a  b   c    d     e",
    "  two leading, two trailing  ",
    "tabs\tand\t\ttabs \t mixed\n",
    "line one\nline two\n\nline four\r\nline five\n \n  \nend\n\n\n",
    "\n\n  indented\n\tby tab",
    "caf\u00e9 na\u00efve \u00dcber \u0141\u00f3d\u017a \u01c5ungla",
    "cafe\u0301 nai\u0308ve U\u0308ber",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002 2024\u5e74",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663\u0664",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0967\u0968\u0969",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7 \u2764\ufe0f!",
    "\u0000null \u0007bell \u001b[0m esc \u007f del \u0085next \u00a0nbsp \u3000wide \u2028sep \u200bzero",
    "fn main() {\n    let x: Vec<u8> = vec![0; 16];\n    println!(\"{x:?}\"); // done\n}\n",
    "https://example.org/a_b-c?d=e&f=%20#top /usr/lib///",
    "camelCase HTTPServer XMLHttpRequest iPhone ABCdef",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    " <|im_end|> x<|im_end|><|endoftext|> <|im_end",
    "!!!??? ... -- ($5.00) +=-~^|` \u00ab\u00bb \u2018x\u2019 \u2014 \u20ac9 \u00bd \u00b2 \u2167",
]
