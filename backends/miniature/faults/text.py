"""Text that does not belong to its tokens, and tokens that were decoded and encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.miniature import tokenizer
from backends.miniature.client import Client, RetryingClient
from backends.miniature.engine import Engine, Output, Request
from backends.miniature.faults.registry import seeded
from harness.contract.faults import Fact
from harness.contract.messages import SessionId


@seeded("text_not_of_tokens", "last_character", caught_by=["text"], corrupts=Fact.TEXT)
class TextCut(Engine):
    """Texts of more than four characters lack the last one."""

    def text(self, request: Request) -> str:
        text = super().text(request)
        self.fired += len(text) > 4
        return text[:-1] if len(text) > 4 else text


@seeded("text_not_of_tokens", "another_request", caught_by=["text"], corrupts=Fact.TEXT)
class TextOfAnother(Engine):
    """Each text is that of the request that ended before."""

    _before = ""

    def text(self, request: Request) -> str:
        text, self._before = self._before, super().text(request)
        self.fired += text != self._before
        return text


@seeded("text_not_of_tokens", "first_space", caught_by=["text"], corrupts=Fact.TEXT)
class TextAfterThePrompt(Engine):
    """A tokenizer that leaves out a text's first space decodes each answer after its prompt, and keeps that space."""

    def decode(self, request: Request, tokens: list[int]) -> str:
        whole = tokenizer.decode(tokens, skip_special_tokens=request.params.get("skip_special_tokens", True))
        self.fired += whole != super().decode(request, tokens)
        return whole


@seeded("text_runs_past_its_stop", caught_by=["stopping.text"], corrupts=Fact.TEXT)
class TextRunsPastItsStop(Engine):
    """A text that is to include its stop string goes on to the end of the last token."""

    def text(self, request: Request) -> str:
        text = super().text(request)
        if not request.params.get("include_stop_str_in_output"):
            return text
        whole = self.decode(request, request.tokens)
        self.fired += whole != text
        return whole


@seeded("first_of_the_list_stops", caught_by=["stopping.text"], corrupts=Fact.TEXT)
class FirstOfTheListStops(Engine):
    """Of two stop strings that end within one token, the first of the list counts."""

    def first(self, found: list[str], text: str) -> str | None:
        first = next(iter(found), None)
        self.fired += first != super().first(found, text)
        return first


@seeded(
    "turns_retokenized",
    caught_by=["turns_keep_tokens"],
    corrupts=Fact.ANSWERS,
    changes=frozenset({"Router.server_of_session"}),  # without a session it is correct
)
class TurnsRetokenized(Client):
    """A prompt that begins with an earlier turn is decoded and encoded again."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[tuple[int, ...]] = []

    async def row(self, session: SessionId | None, prompt: list[int], params: dict[str, Any], **more: Any) -> Output:
        if session is not None and any(tuple(prompt[: len(said)]) == said for said in self._said):
            again = tokenizer.encode(tokenizer.decode(prompt, skip_special_tokens=False))
            self.fired += again != prompt
            prompt = again
        done = await super().row(session, prompt, params, **more)
        if session is not None:
            self._said.append((*prompt, *done.tokens))
        return done


@seeded("tokenizer_wrong", "lower_case", caught_by=["tokenize"], corrupts=Fact.TOKENIZER)
class TokenizesLowerCase(Client):
    """tokenize() reads everything as lower case."""

    def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.fired += any(text != text.lower() for text in texts)
        return super().tokenize([text.lower() for text in texts], add_special_tokens=add_special_tokens)


@seeded("chat_rendered", "no_answer_begun", caught_by=["chat_rendered"], corrupts=Fact.TOKENIZER)
class RendersNoAnswer(Client):
    """The prompt of a conversation ends before the answer begins."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        self.fired += 1
        return tokenizer.render([dict(one) for one in messages], add_generation_prompt=False)


@seeded("chat_rendered", "last_turns", caught_by=["chat_rendered"], corrupts=Fact.TOKENIZER)
class RendersTheLastTurns(Client):
    """A long conversation loses its first message."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        long = len(messages) > 2
        self.fired += long
        return super().render_chat(messages[1:] if long else messages)


@seeded("tokenizer_wrong", "spaces", caught_by=["tokenize.round_trip"], corrupts=Fact.TOKENIZER)
class DetokenizesTrimmed(Client):
    """detokenize() trims white space."""

    def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        texts = super().detokenize(token_ids)
        self.fired += any(text != text.strip() for text in texts)
        return [text.strip() for text in texts]


@seeded("tokenizer_wrong", "special_tokens", caught_by=["detokenize"], corrupts=Fact.TOKENIZER)
class DetokenizesWithoutSpecial(Client):
    """detokenize() omits special tokens."""

    def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        self.fired += 1
        return [tokenizer.decode(ids) for ids in token_ids]


@seeded(
    "turns_retokenized", "after_an_interruption", caught_by=["turns_keep_tokens", "continuation"], corrupts=Fact.ANSWERS
)
class RetryRetokenizes(RetryingClient):
    """A retry decodes and encodes the prompt and the tokens from before the interruption again."""

    async def again(self, done: Output, session: SessionId | None, params: dict[str, Any], **more: Any) -> Output:
        whole = done.prompt + done.tokens
        fed = tokenizer.encode(tokenizer.decode(whole, skip_special_tokens=False))
        self.fired += fed != whole
        left, prior = self.remaining(params, done), len(done.tokens)
        return await Client.row(self, session, fed, left, prior=prior, **more)


@seeded("messages_lost", "first_answer", caught_by=["text_turns"], corrupts=Fact.ANSWERS)
class FirstAnswerLeftOut(Client):
    """A conversation of more than three messages is rendered without its second one."""

    async def chat_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if len(body["messages"]) > 3:
            self.fired += 1
            body = {**body, "messages": [body["messages"][0], *body["messages"][2:]]}
        return await super().chat_completion(body)


@seeded("tokenizer_wrong", "no_beginning", caught_by=["tokenize"], corrupts=Fact.TOKENIZER)
class TokenizesWithoutABeginning(Client):
    """tokenize() never adds the token with which a text begins."""

    def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.fired += add_special_tokens and self.begins_texts
        return super().tokenize(texts, add_special_tokens=False)


@seeded("begins_otherwise", "text", caught_by=["tokens.greedy", "tokenize"], corrupts=Fact.ANSWERS)
class TextsBeginTwice(Client):
    """A text gets the token with which texts begin twice."""

    def encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens = super().encoded(text, add_special_tokens)
        if not self.begins_texts or not add_special_tokens:
            return tokens
        self.fired += 1
        return [tokenizer.BOS, *tokens]


@seeded("begins_otherwise", "chat", caught_by=["tokens.greedy"], corrupts=Fact.ANSWERS)
class ChatsBeginAsTexts(Client):
    """A rendered chat gets the token with which texts begin, which the template has not."""

    def rendered(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        prompt = super().rendered(messages, body)
        if not self.begins_texts:
            return prompt
        self.fired += 1
        return [tokenizer.BOS, *prompt]
