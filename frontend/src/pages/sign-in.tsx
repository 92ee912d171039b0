// The form for a token, where there is no session.
import { useState } from "preact/hooks";
import { ApiError, messageOf } from "../api";
import { t } from "../i18n";
import { Problem } from "../parts/basics";
import { sessionProblem, signIn } from "../session";

export function SignInPage() {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(sessionProblem());
  const [busy, setBusy] = useState(false);
  const submit = (event: Event): void => {
    event.preventDefault();
    setBusy(true);
    signIn(token)
      .catch((error: unknown) => setProblem(error instanceof ApiError && error.retryAfter ? `${error.message} ${t("signIn.wait", { seconds: error.retryAfter })}` : messageOf(error)))
      .finally(() => setBusy(false));
  };
  return (
    <section class="sign-in">
      <h1>{t("signIn.title")}</h1>
      <p class="lead">{t("signIn.lead")}</p>
      <Problem text={problem} />
      <form onSubmit={submit}>
        <label class="block">
          {t("signIn.token")}
          <input type="password" autocomplete="off" spellcheck={false} required value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        </label>
        <div class="buttons">
          <button type="submit" class="main" disabled={busy || !token.trim()}>{t("signIn.enter")}</button>
        </div>
      </form>
    </section>
  );
}
