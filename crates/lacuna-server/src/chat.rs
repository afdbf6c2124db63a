//! A chat, as all interfaces ask for it: what each of them reads its requests into.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use lacuna_engine::Request;
use lacuna_text::template::Message;
use lacuna_text::tokenizer::SpecialText;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{HasImages, Image};
use crate::openai::parameters::Parameters;
use crate::reply::parts::PartReader;
use crate::reply::{Note, Reader};
use crate::sharing::Client;
use crate::structured::calls::CallReader;
use crate::structured::tools::{ToolChoice, ToolSyntax, Tools};
use crate::structured::{Format, Rule};

/// What is asked for.
#[derive(Debug, Default)]
pub(crate) struct Chat {
    /// As the chat template takes them; at least one.
    pub(crate) messages: Vec<Message>,
    /// The images that have places in them, in order.
    pub(crate) images: Vec<Image>,
    /// In the form that chat templates and OpenAI have.
    pub(crate) tools: Vec<Value>,
    pub(crate) tool_choice: Option<ToolChoice>,
    /// Whether a reply calls one tool at most.
    pub(crate) one_call: bool,
    pub(crate) format: Option<Format>,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub(crate) variables: Option<Map<String, Value>>,
    pub(crate) parameters: Parameters,
    pub(crate) logprobs: Option<usize>,
    /// For how long the prompt's pages are the last to be evicted.
    pub(crate) pin_prefix: Option<Duration>,
}

impl Chat {
    /// The request to the engine, and what reads the reply, whose name is `id`.
    ///
    /// # Errors
    /// [`ApiError`], with the names that fields have in OpenAI's interface.
    pub(crate) fn request(
        self,
        app: &App,
        client: Client,
        id: &str,
        ignored: &mut Ignored,
    ) -> Result<(Request, Reader), ApiError> {
        app.check_images(&self.images)?;
        let parameters = &self.parameters;
        app.check_choices(parameters.choices())?;
        let once = !app.teaches_tools() || self.one_call;
        let tools = Tools::new(self.tools, self.tool_choice)?.called_once(once);
        let syntax = app.tool_syntax();
        let rule = Rule::new(self.format, &tools, syntax, ignored)?;
        let variables = app.template_variables(self.variables, parameters.effort());
        let limits = app.encode_limits();
        let mut prompt = app.conversation(&self.messages, tools.offered(), variables, &limits)?;
        let images = app.show(&mut prompt.tokens, &self.images)?;
        let note = Note {
            echo: None,
            first: prompt.tokens.first().copied(),
        };
        let recommended = app.model().recommended_sampling();
        let mut request = parameters.request(prompt.tokens, None, recommended)?;
        let marked = tools.are_offered() && !app.call_marks().is_empty();
        let mut reader = prompt.reader;
        match request.limits.special {
            // The markup as it is was asked for. Without it there would be nothing to tell parts by.
            SpecialText::Show if syntax == ToolSyntax::Harmony => reader = None,
            SpecialText::Show => {}
            _ if marked || reader.is_some() => request.limits.special = SpecialText::Mark,
            _ => {}
        }
        request.prefix_namespace = app.sharing.namespace(client, parameters.cache_salt()?);
        request.images = images;
        request.pin_prefix = self.pin_prefix;
        request.session = app.session(client, parameters.session.as_deref())?;
        request.logprobs = self.logprobs;
        request.constraint = app.constraint(rule, reader.as_ref())?;
        match (parameters.reasoning_budget(), &reader) {
            (Some((_, most)), Some(reader)) => {
                request.constraint = app.end_thoughts(most, reader, request.constraint.take())?;
            }
            // Nothing tells thoughts from what is said.
            (Some((field, _)), None) => ignored.note(field)?,
            _ => {}
        }
        let calls = tools
            .are_offered()
            .then(|| CallReader::new(syntax, &tools, id));
        let parts = PartReader::new(reader, calls, parameters.includes_reasoning());
        let parts = match marked {
            true => parts.keeping(app.call_marks()),
            false => parts,
        };
        let reader = Reader::new(Some(&request), &[note], parts);
        Ok((request, reader))
    }

    /// The tokens that the prompt comes to, however many.
    ///
    /// # Errors
    /// As [`Chat::request`].
    pub(crate) fn tokens(self, app: &App) -> Result<Vec<u32>, ApiError> {
        app.check_images(&self.images)?;
        let tools = Tools::new(self.tools, self.tool_choice)?;
        let variables = app.template_variables(self.variables, self.parameters.effort());
        let limits = app.any_tokens();
        let mut prompt = app.conversation(&self.messages, tools.offered(), variables, &limits)?;
        app.make_places(&mut prompt.tokens, &self.images)?;
        Ok(prompt.tokens)
    }
}

impl HasImages for Chat {
    fn images(&mut self) -> &mut [Image] {
        &mut self.images
    }
}

/// A content: one text, or a list of parts of which the interface knows what they are.
#[derive(Debug)]
pub(crate) enum TextOrParts<T> {
    Text(String),
    Parts(Vec<T>),
}

impl<T> TextOrParts<T> {
    pub(crate) fn parts(&self) -> &[T] {
        match self {
            Self::Text(_) => &[],
            Self::Parts(parts) => parts,
        }
    }
}

/// Written out, because a derived choice between the two would lose the paths of what is in parts.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOrParts<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = TextOrParts<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of `text` parts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOrParts::Text(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(TextOrParts::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(TextOrParts::Parts)
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// A call in a message of the assistant, as chat templates take it.
pub(crate) fn call(id: Option<String>, name: &str, arguments: Value) -> Value {
    json!({
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    })
}

/// Templates write arguments as JSON themselves, so they get the value and not its text.
pub(crate) fn arguments(text: String) -> Value {
    let value = serde_json::from_str(&text).ok().filter(Value::is_object);
    value.unwrap_or(Value::String(text))
}
