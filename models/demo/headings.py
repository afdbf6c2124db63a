"""Headings and the questions they answer.

A prompt becomes a heading, so every section is trained under several headings:
its own, a few rephrasings made by rule, and for well-known topics the questions
in `ALIASES`.
"""

import re

# Heading in the documentation -> questions a reader may ask instead.
ALIASES = {
    "What Is Ownership?": ["What is ownership?", "What is ownership in Rust?", "How does ownership work?", "Ownership", "Explain ownership"],
    "Ownership Rules": ["What are the ownership rules?", "What are the rules of ownership?"],
    "The Stack and the Heap": ["What is the heap?", "What is the stack?", "What is the difference between the stack and the heap?", "Stack and heap", "What are the stack and the heap?"],
    "Variable Scope": ["What is a scope?", "What is variable scope?"],
    "Memory and Allocation": ["How does Rust manage memory?", "How does memory allocation work?"],
    "Variables and Data Interacting with Move": ["What is a move?", "What happens when a value is moved?"],
    "Variables and Data Interacting with Clone": ["What is a clone?", "How do I clone a value?", "What does clone do?"],
    "Stack-Only Data: Copy": ["What is the Copy trait?", "What is the `Copy` trait?"],
    "References and Borrowing": ["What is borrowing?", "What is a reference?", "How does borrowing work?", "Borrowing", "What is borrowing in Rust?", "Explain borrowing"],
    "Mutable References": ["What is a mutable reference?", "What are mutable references?"],
    "Dangling References": ["What is a dangling reference?"],
    "The Rules of References": ["What are the rules of references?", "What are the borrowing rules?"],
    "The Slice Type": ["What is a slice?", "What are slices?"],
    "String Slices": ["What is a string slice?"],
    "Defining and Instantiating Structs": ["What is a struct?", "How do I define a struct?", "What are structs?"],
    "Methods": ["What is a method?", "What are methods?"],
    "Associated Functions": ["What is an associated function?"],
    "Defining an Enum": ["What is an enum?", "How do I define an enum?", "What are enums?"],
    "The `Option` Enum": ["What is an Option?", "What is the Option type?", "What is Option?"],
    "The `match` Control Flow Construct": ["What is match?", "How does match work?", "What is pattern matching?", "How does pattern matching work?"],
    "Packages and Crates": ["What is a crate?", "What is a package?", "What are crates?"],
    "Control Scope and Privacy with Modules": ["What is a module?", "What are modules?", "How do modules work?"],
    "Storing Lists of Values with Vectors": ["What is a vector?", "What is a Vec?", "What are vectors?", "How do I store a list of values?", "What is a `Vec<T>`?", "What is Vec?"],
    "Storing UTF-8 Encoded Text with Strings": ["What is a string?", "How do strings work?"],
    "The `String` Type": ["What is a String?", "What is the String type?"],
    "Storing Keys with Associated Values in Hash Maps": ["What is a hash map?", "What is a HashMap?", "How do I use a hash map?"],
    "Error Handling": ["How does error handling work?", "How do I handle errors?", "How does Rust handle errors?", "What is error handling?", "How does error handling work in Rust?"],
    "Unrecoverable Errors with `panic!`": ["What is a panic?", "What does panic! do?", "What happens when a program panics?"],
    "Recoverable Errors with `Result`": ["What is a Result?", "What is the Result type?", "How do I recover from an error?"],
    "The `?` Operator Shortcut": ["What is the ? operator?", "What does the question mark operator do?"],
    "Generic Data Types": ["What is a generic type?", "What are generics?", "How do generics work?"],
    "Defining a Trait": ["What is a trait?", "What are traits?", "How do I define a trait?", "How do traits work?", "What is a trait in Rust?", "Explain traits"],
    "Trait Bound Syntax": ["What is a trait bound?", "What are trait bounds?"],
    "Validating References with Lifetimes": ["What is a lifetime?", "What are lifetimes?", "How do lifetimes work?", "What is a lifetime in Rust?", "Explain lifetimes", "Lifetimes"],
    "The Borrow Checker": ["What is the borrow checker?", "How does the borrow checker work?"],
    "Lifetime Elision": ["What is lifetime elision?"],
    "The Static Lifetime": ["What is the static lifetime?", "What does 'static mean?"],
    "How to Write Tests": ["How do I write tests?", "How do I write a test?"],
    "Unit Tests": ["What is a unit test?"],
    "Integration Tests": ["What is an integration test?"],
    "Closures": ["What is a closure?", "What are closures?", "How do closures work?"],
    "Processing a Series of Items with Iterators": ["What is an iterator?", "What are iterators?", "How do iterators work?"],
    "Cargo Workspaces": ["What is a workspace?"],
    "Smart Pointers": ["What is a smart pointer?", "What are smart pointers?"],
    "Using `Box<T>` to Point to Data on the Heap": ["What is a Box?", "What is a `Box<T>`?", "When should I use a Box?"],
    "Treating Smart Pointers Like Regular References": ["What is the Deref trait?"],
    "Running Code on Cleanup with the `Drop` Trait": ["What is the Drop trait?", "What does drop do?"],
    "`Rc<T>`, the Reference-Counted Smart Pointer": ["What is an Rc?", "What is reference counting?", "What is Rc?"],
    "`RefCell<T>` and the Interior Mutability Pattern": ["What is a RefCell?", "What is interior mutability?"],
    "Reference Cycles Can Leak Memory": ["What is a reference cycle?", "What is a memory leak?"],
    "Fearless Concurrency": ["What is concurrency?", "How does concurrency work?"],
    "Using Threads to Run Code Simultaneously": ["What is a thread?", "How do I use threads?", "How do threads work?"],
    "Transfer Data Between Threads with Message Passing": ["What is a channel?", "How do I send data between threads?", "What is message passing?"],
    "Controlling Access with Mutexes": ["What is a mutex?", "What is a Mutex?"],
    "Atomic Reference Counting with `Arc<T>`": ["What is an Arc?", "What is Arc?"],
    "Extensible Concurrency with `Send` and `Sync`": ["What are Send and Sync?"],
    "Futures and the Async Syntax": ["What is a future?", "How does async work?", "What is async?"],
    "Using Trait Objects to Abstract over Shared Behavior": ["What is a trait object?", "What are trait objects?"],
    "Characteristics of Object-Oriented Languages": ["Is Rust an object-oriented language?"],
    "Patterns and Matching": ["What is a pattern?", "What are patterns?"],
    "Unsafe Rust": ["What is unsafe Rust?", "What does unsafe mean?", "What is unsafe?"],
    "Dereferencing a Raw Pointer": ["What is a raw pointer?"],
    "Macros": ["What is a macro?", "What are macros?", "How do macros work?"],
    "Introduction": ["What is Rust?", "What is the Rust programming language?"],
    "Hello, Cargo!": ["What is Cargo?", "What is cargo?", "How do I use Cargo?"],
    "Hello, World!": ["How do I write a program?", "How do I print hello world?"],
    "Variables and Mutability": ["What is a variable?", "How do variables work?", "What is mutability?"],
    "Declaring Constants": ["What is a constant?"],
    "Shadowing": ["What is shadowing?"],
    "Data Types": ["What is a data type?", "What data types does Rust have?"],
    "The Tuple Type": ["What is a tuple?"],
    "The Array Type": ["What is an array?"],
    "Integer Types": ["What is an integer?"],
    "Functions": ["What is a function?", "How do I define a function?", "How do functions work?"],
    "Statements and Expressions": ["What is an expression?", "What is a statement?"],
    "Comments": ["What is a comment?", "How do I write a comment?"],
    "Control Flow": ["What is control flow?"],
    "Repetition with Loops": ["What is a loop?", "How do I write a loop?", "How do loops work?"],
    "Installation": ["How do I install Rust?"],
}
# How a passage of the Book begins -> questions that it answers on its own.
ANSWERS = {
    "We call the action of creating a reference": ["What is borrowing?", "Borrowing", "How does borrowing work?", "What is borrowing in Rust?", "Explain borrowing"],
    "A reference is like a pointer": ["What is a reference?"],
    "A trait defines the functionality": ["What is a trait?", "What are traits?", "What is a trait in Rust?", "Explain traits", "How do traits work?"],
    "The heap is less organized": ["What is the heap?"],
    "The stack stores values": ["What is the stack?"],
    "The Rust programming language helps": ["What is Rust?", "What is the Rust programming language?"],
    "A package is a bundle": ["What is a package?"],
    "A future is a value": ["What is a future?"],
    "A struct, or structure,": ["What is a struct?", "What are structs?"],
}
GERUNDS = {
    "Adding": "add", "Accessing": "access", "Allowing": "allow", "Appending": "append", "Building": "build",
    "Calling": "call", "Capturing": "capture", "Checking": "check", "Cloning": "clone", "Comparing": "compare",
    "Controlling": "control", "Creating": "create", "Customizing": "customize", "Declaring": "declare",
    "Defining": "define", "Destructuring": "destructure", "Generating": "generate", "Grouping": "group",
    "Handling": "handle", "Ignoring": "ignore", "Implementing": "implement", "Indexing": "index",
    "Installing": "install", "Iterating": "iterate", "Making": "make", "Matching": "match", "Printing": "print",
    "Processing": "process", "Propagating": "propagate", "Publishing": "publish", "Reading": "read",
    "Removing": "remove", "Returning": "return", "Running": "run", "Sending": "send", "Sharing": "share",
    "Storing": "store", "Testing": "test", "Updating": "update", "Using": "use", "Working": "work", "Writing": "write",
}
SMALL_WORDS = {"a", "an", "and", "as", "for", "from", "in", "into", "is", "of", "on", "or", "the", "to", "with"}


def sentence_case(text):
    """`What Is Ownership?` -> `What is ownership?`; code and names in capitals stay."""
    words = text.split(" ")
    lowered = [word if re.search(r"[`:.!]|[a-z][A-Z]|[A-Z]{2}", word) else word.lower() for word in words]
    keep = {"Rust", "Cargo", "Copy", "Drop", "Option", "Result", "Send", "Sync", "String"}
    lowered = [word if word in keep else low for word, low in zip(words, lowered)]
    result = " ".join(lowered)
    return result[:1].upper() + result[1:]


RESERVED = {question for questions in ALIASES.values() for question in questions}


def without_reserved(variants):
    """Leave the questions of `ALIASES` to the sections they stand for."""
    own, *others = dict.fromkeys(variants)
    return [own] + [variant for variant in others if variant not in RESERVED]


def heading_variants(heading, aliases):
    """Every heading under which a section of a book is trained."""
    plain = sentence_case(heading)
    variants = [heading, plain]
    first, _, rest = plain.partition(" ")
    if rest and first in GERUNDS:
        variants.append(f"How do I {GERUNDS[first]} {rest}?")
    elif re.match(r"(the|The) ", plain):
        variants.append(f"What is {plain[0].lower()}{plain[1:]}?")
    elif not re.match(r"(What|How|Why|When|Where|Summary|To)\b", plain) and len(plain.split()) <= 3:
        variants.append(f"What {'are' if plain.endswith('s') else 'is'} {plain[0].lower()}{plain[1:]}?")
    if "`" in heading:
        variants.append(plain.replace("`", ""))
    return without_reserved(variants) + aliases.get(heading, [])


def item_variants(kind, name):
    """Every heading under which an item of the standard library is trained."""
    return without_reserved(item_questions(kind, name))


def item_questions(kind, name):
    """The ways to name or to ask for an item of the standard library."""
    short = name.split("::")[-1]
    if kind == "keyword":
        return [f"The `{short}` keyword", f"What is the `{short}` keyword?", f"What does `{short}` do?", f"The {short} keyword"]
    if kind == "primitive":
        return [f"The `{short}` type", f"What is the `{short}` type?", f"Primitive type `{short}`", f"What is a {short}?"]
    if kind == "module":
        return [f"Module `{name}`", f"What is `{name}`?", f"What is in the `{name}` module?", f"The {short} module"]
    if kind == "macro":
        return [f"The `{short}!` macro", f"What does `{short}!` do?", f"`{name}!`"]
    if kind == "fn":
        return [f"`{name}`", f"What does `{name}` do?", f"The `{short}` function"]
    if kind == "trait":
        return [f"The `{short}` trait", f"What is the `{short}` trait?", f"`{name}`", f"What is {short}?", f"{short}"]
    article = "an" if short[:1] in "AEIOU" else "a"
    return [f"`{name}`", f"What is `{short}`?", f"What is {article} `{short}`?", f"What is {article} {short}?", short]
