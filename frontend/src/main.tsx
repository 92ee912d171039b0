// The frame of the page: header, navigation, the page that the fragment names, and a footer.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import { messageOf } from "./api";
import { type Key, LANGUAGES, type Language, currentLanguage, languageTopic, setLanguage, startLanguage, t } from "./i18n";
import { AccessPage } from "./pages/access";
import { ClientsPage } from "./pages/clients";
import { ComparePage } from "./pages/compare";
import { RunPage } from "./pages/run/page";
import { RunsPage, ticked, tickedTopic } from "./pages/runs";
import { SignInPage } from "./pages/sign-in";
import { StartPage } from "./pages/start";
import { type PageName, type Route, compareLink, useRoute } from "./router";
import { can, currentSession, openSession, sessionState, sessionTopic, signOut } from "./session";
import { forgetAll, runs, runsTopic } from "./store";
import { closeStream, connectionTopic, currentConnection, openStream } from "./stream";
import "./style/app.css";
import { SCHEMES, type Scheme, currentScheme, setScheme, startTheme, themeTopic } from "./theme";
import { useTopic } from "./topic";

function App() {
  useTopic(sessionTopic);
  useTopic(languageTopic);
  const route = useRoute();
  const state = sessionState();
  useEffect(() => {
    if (state !== "open") return;
    openStream();
    return () => {
      closeStream();
      forgetAll();
    };
  }, [state]);
  return (
    <>
      <Title route={route} />
      <a class="skip" href="#main" onClick={skip}>{t("page.skip")}</a>
      <Header route={route} />
      {state === "open" && <Reconnecting />}
      <main id="main" tabIndex={-1}>
        {state === "opening" && <p class="note">{t("page.loading")}</p>}
        {state === "closed" && <SignInPage />}
        {state === "open" && <Page route={route} />}
      </main>
      <footer>{currentSession() && `Atoll ${currentSession()!.version} · `}{t("page.footer")}</footer>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Page({ route }: { route: Route }) {
  switch (route.page) {
    case "run": return <RunPage key={route.id} route={route} />;
    case "compare": return <ComparePage route={route} />;
    case "clients": return <ClientsPage />;
    case "start": return <StartPage />;
    case "access": return <AccessPage />;
    default: return <RunsPage />;
  }
}

function Header({ route }: { route: Route }) {
  useTopic(tickedTopic);
  useTopic(themeTopic);
  const session = currentSession();
  const links: [PageName, string][] = [["runs", "#/"], ["compare", ticked.size ? compareLink(ticked) : "#/compare"]];
  if (session?.kind === "federation") links.push(["clients", "#/clients"]);
  if (can("add_run")) links.push(["start", "#/start"]);
  if (can("access_add")) links.push(["access", "#/access"]);
  return (
    <header>
      <div class="top">
        <p class="brand">
          <svg viewBox="0 0 32 32" aria-hidden="true">
            <circle cx="16" cy="16" r="11" pathLength={36} />
            <circle class="lagoon" cx="16" cy="16" r="4.5" />
          </svg>
          Atoll {session && <span>{session.title}</span>}
        </p>
        <div class="settings">
          <select aria-label={t("page.language")} value={currentLanguage()} onChange={(event) => setLanguage(event.currentTarget.value as Language)}>
            {Object.entries(LANGUAGES).map(([key, name]) => <option key={key} value={key}>{name}</option>)}
          </select>
          <select aria-label={t("page.theme")} value={currentScheme()} onChange={(event) => setScheme(event.currentTarget.value as Scheme)}>
            {SCHEMES.map((scheme) => <option key={scheme} value={scheme}>{t(`theme.${scheme}`)}</option>)}
          </select>
          {session && <SignOut />}
        </div>
      </div>
      {session && (
        <nav class="pages" aria-label={t("page.navigation")}>
          {links.map(([page, link]) => (
            <a key={page} href={link} aria-current={route.page === page || (page === "runs" && route.page === "run") ? "page" : undefined}>
              {t(`nav.${page}` as Key)}{page === "compare" && ticked.size > 0 && ` (${ticked.size})`}
            </a>
          ))}
        </nav>
      )}
    </header>
  );
}

function SignOut() {
  const [problem, setProblem] = useState("");
  const session = currentSession()!;
  return (
    <button type="button" title={`${session.name}, ${t(`role.${session.role}`)}. ${problem}`} onClick={() => void signOut().catch((error: unknown) => setProblem(messageOf(error)))}>
      {t("page.signOut", { name: session.name })}
    </button>
  );
}

function Reconnecting() {
  useTopic(connectionTopic);
  return <div role="status">{currentConnection() === "reconnecting" && <p class="reconnecting">{t("page.reconnecting")}</p>}</div>;
}

/** The title of the tab, which moves with a live run. */
function Title({ route }: { route: Route }) {
  useTopic(runsTopic);
  const run = route.page === "run" ? runs.get(route.id) : undefined;
  const name = route.page === "run" ? `${run?.name || route.id}${run?.status === "running" ? ` ${run.round}/${run.rounds}` : ""}` : t(`nav.${route.page}` as Key);
  useEffect(() => {
    document.title = sessionState() === "closed" ? "Atoll" : `${name} · Atoll`;
  });
  return null;
}

startTheme();
startLanguage();
void openSession(); // takes the token out of the address before anything is drawn
render(<App />, document.getElementById("app")!);
